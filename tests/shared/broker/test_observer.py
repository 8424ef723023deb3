"""Leases as their observer judges them: its own connected time, nothing else."""

import pytest

from shared.broker.control import Look, Observer
from shared.keys import Role
from shared.messages import Heartbeat, encode

LEASES: dict[Role, float] = {"scheduler": 5.0, "api": 15.0, "tokenizer": 1.5, "detokenizer": 1.5}


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def observer(clock: Clock) -> Observer:
    return Observer("me", leases=LEASES, interval_s=0.5, clock=clock)


def beat(count: int) -> bytes:
    return encode(Heartbeat(count, "x"))


def look(**counts: int) -> Look:
    return {"scheduler": {name: beat(count) for name, count in counts.items()}}


def watch(observer: Observer, clock: Clock, looks: int, *, every_s: float = 0.5, **counts: int) -> None:
    for _ in range(looks):
        clock.now_s += every_s
        observer.note(look(**counts))


def test_dead_is_unchanged_for_a_lease(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 10, a=1)
    assert "a" not in observer.dead("scheduler")
    assert set(observer.living("scheduler")) == {"a"}
    watch(observer, clock, 1, a=1)
    assert "a" in observer.dead("scheduler")
    assert observer.dead("scheduler") == {"a": beat(1)}
    assert observer.living("scheduler") == {}


def test_who_was_seen_to_end_is_dead_at_the_first_look(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 1, a=1, b=1)
    told = encode(Heartbeat(1, "x", ended=True))
    observer.note({"scheduler": {"a": told, "b": beat(1), "me": told}})
    assert observer.dead("scheduler") == {"a": told}, "with the beat that retires it; and nobody is dead for himself"
    assert observer.forgettable("scheduler") == {}, "others have not looked yet"
    for _ in range(2):
        clock.now_s += 0.5
        observer.note({"scheduler": {"a": told, "b": beat(1), "me": told}})
    assert observer.forgettable("scheduler") == {"a": told}
    observer.lost()
    assert "a" in observer.dead("scheduler"), "an outage of the broker brings nobody back"
    watch(observer, clock, 1, a=2, b=1)
    assert set(observer.living("scheduler")) == {"a", "b"}


def test_any_change_is_life(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 20, a=5)
    watch(observer, clock, 1, a=4)
    assert "a" not in observer.dead("scheduler"), "a count that goes back was written too"


def test_a_long_absence_of_the_observer_counts_two_intervals(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 2, a=1)
    watch(observer, clock, 1, every_s=3600.0, a=1)
    assert "a" not in observer.dead("scheduler")


def test_a_lost_connection_starts_anew(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 10, a=1)
    observer.lost()
    clock.now_s += 60
    watch(observer, clock, 10, a=1)
    assert "a" not in observer.dead("scheduler")
    watch(observer, clock, 1, a=1)
    assert "a" in observer.dead("scheduler")


def test_the_dead_stay_dead_over_a_lost_connection_only_after_a_lease(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 12, a=1)
    assert "a" in observer.dead("scheduler")
    observer.lost()
    assert "a" not in observer.dead("scheduler")


def test_i_am_never_dead(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 100, me=1)
    assert "me" not in observer.dead("scheduler")
    assert set(observer.living("scheduler")) == {"me"}


def test_the_unregistered_are_unknown_not_dead(observer: Observer, clock: Clock) -> None:
    watch(observer, clock, 100, a=1)
    watch(observer, clock, 1)
    assert "a" not in observer.dead("scheduler")
    assert "a" not in observer.standings("scheduler")
    assert observer.dead("scheduler") == observer.living("scheduler") == {}
    watch(observer, clock, 1, a=1)
    assert "a" not in observer.dead("scheduler"), "who comes back is seen for the first time"


def test_roles_have_their_own_leases(observer: Observer, clock: Clock) -> None:
    for _ in range(12):
        clock.now_s += 0.5
        observer.note({"scheduler": {"x": beat(1)}, "api": {"x": beat(1)}})
    assert "x" in observer.dead("scheduler")
    assert "x" not in observer.dead("api")


def test_a_heartbeat_of_another_release_is_neither_living_nor_dead(observer: Observer) -> None:
    observer.note({"scheduler": {"a": b"\xc1", "b": beat(1)}})
    assert set(observer.living("scheduler")) == {"b"}
    assert observer.dead("scheduler") == {}
    assert "a" in observer.standings("scheduler")


def place(count: int, name: str = "x", port: int = 9102) -> bytes:
    return encode(Heartbeat(count, name, port=port))


def test_who_is_succeeded_has_only_the_shortest_lease_left(observer: Observer, clock: Clock) -> None:
    for count in range(4):
        clock.now_s += 0.5
        observer.note({"scheduler": {"old": place(7), "new": place(count)}})
    assert set(observer.dead("scheduler")) == {"old"}
    assert set(observer.living("scheduler")) == {"new"}


def test_the_observer_itself_may_be_the_successor(observer: Observer, clock: Clock) -> None:
    for _ in range(4):
        clock.now_s += 0.5
        observer.note({"scheduler": {"old": place(7), "me": place(1)}})
    assert set(observer.dead("scheduler")) == {"old"}


@pytest.mark.parametrize("other", [place(7, "y"), place(7, port=9112), place(7, port=0)])
def test_another_name_or_port_succeeds_nobody(observer: Observer, clock: Clock, other: bytes) -> None:
    for count in range(4):
        clock.now_s += 0.5
        observer.note({"scheduler": {"old": other, "new": place(count)}})
    assert observer.dead("scheduler") == {}


def test_two_that_beat_in_one_place_both_live(observer: Observer, clock: Clock) -> None:
    for count in range(20):
        clock.now_s += 0.5
        observer.note({"scheduler": {"a": place(count), "b": place(count)}})
    assert set(observer.living("scheduler")) == {"a", "b"}


def test_two_that_stand_still_in_one_place_wait_for_their_leases(observer: Observer, clock: Clock) -> None:
    for _ in range(10):
        clock.now_s += 0.5
        observer.note({"scheduler": {"a": place(1), "b": place(1)}})
    assert observer.dead("scheduler") == {}
