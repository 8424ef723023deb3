from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.shards import owned_shards
from shared.messages import Heartbeat

NAMES = st.sets(st.integers(0, 50).map(lambda i: f"detokenizer-{i}"), min_size=1, max_size=8)


def beat(name: str, *, model: str = "m", draining: bool = False) -> Heartbeat:
    return Heartbeat(1, name, model=model, draining=draining)


@given(NAMES)
def test_each_shard_has_one_owner_when_all_see_the_same(names: set[str]) -> None:
    living = {f"{name}-x": beat(name) for name in names}
    owned = [shard for name in names for shard in owned_shards(f"{name}-x", name, "m", living, 4)]
    assert sorted(owned) == [0, 1, 2, 3]


@given(NAMES)
def test_one_more_takes_shards_only_for_itself(names: set[str]) -> None:
    living = {f"{name}-x": beat(name) for name in names}
    more = living | {"new-x": beat("new")}
    for name in names:
        before = owned_shards(f"{name}-x", name, "m", living, 16)
        after = owned_shards(f"{name}-x", name, "m", more, 16)
        assert set(after) <= set(before)


def test_who_sees_nobody_reads_everything() -> None:
    assert owned_shards("a-1", "a", "m", {}, 4) == [0, 1, 2, 3]


def test_the_draining_other_models_and_the_own_predecessor_do_not_count() -> None:
    living = {
        "b-1": beat("b", draining=True),
        "c-1": beat("c", model="other"),
        "a-0": beat("a"),
        "a-1": beat("a", draining=True),
    }
    assert owned_shards("a-1", "a", "m", living, 4) == [0, 1, 2, 3]


def test_shards_spread_over_many() -> None:
    living = {f"d-{i}": beat(f"d{i}") for i in range(4)}
    shares = [len(owned_shards(f"d-{i}", f"d{i}", "m", living, 256)) for i in range(4)]
    assert sum(shares) == 256
    assert min(shares) > 30
