import pytest

from services.scheduler.core.req import make_req
from services.scheduler.core.slots import SlotTable
from shared.errors import ContextLengthExceeded, InvalidRequest
from tests.fakes.link import arrival
from tests.scheduler.driver import limits


def _req(uid: str = "a", **changes):
    return make_req(arrival(uid, b"hello", **changes), limits(), 1)


def test_a_slot_carries_what_its_request_needs():
    table = SlotTable(limits())
    req = _req(said=[65, 66], attempt=9, min_tokens=3, stop_token_ids=[1], ignore_eos=True)
    slot = table.give(req, 4)
    assert table.req(slot) is req and req.slot == slot and table.taken[slot]
    assert table.tokens(slot, 7).tolist() == [*b"hello", 65, 66]
    lengths = (table.known_len, table.prompt_len, table.settled_len, table.planned_len, table.end_len, table.min_len)
    assert [int(array[slot]) for array in lengths] == [7, 5, 4, 4, 13, 8]
    assert (table.uids[slot], table.attempts[slot]) == ("a", 9)
    assert table.has_stop_ids[slot] and table.ignores_eos[slot]


def test_a_slot_in_flight_is_not_given_away():
    table = SlotTable(limits(max_running=1))
    req = _req()
    slot = table.give(req, 0)
    table.last_step[slot] = 5
    table.take_back(req, settled_step=4)
    table.check()
    assert table.num_free == 0 and table.num_taken == 0 and not table.taken[slot]
    table.retire(4)
    assert table.num_free == 0
    table.retire(5)
    assert table.num_free == 1 and table.give(_req("b"), 0) == slot


def test_a_lost_slot_is_found():
    table = SlotTable(limits())
    table.give(_req(), 0)
    table.taken[:] = False
    with pytest.raises(AssertionError, match="slots are lost"):
        table.check()


@pytest.mark.parametrize(("max_tokens", "end_len"), [(8, 13), (10_000, 257), (None, 257)])
def test_an_answer_ends_where_the_pool_ends(max_tokens, end_len):
    assert _req(max_tokens=max_tokens).end_len == end_len


def test_an_answer_ends_where_the_context_ends():
    assert make_req(arrival("a", b"hello", max_tokens=900), limits(num_pages=9999), 1).end_len == 512


@pytest.mark.parametrize("length", [256, 257])
def test_a_prompt_needs_room_for_one_token(length):
    item = arrival("a", [65] * length)
    if length == 256:
        assert make_req(item, limits(), 1).end_len == 257
    else:
        with pytest.raises(ContextLengthExceeded, match="257 tokens; this engine can hold 256"):
            make_req(item, limits(), 1)


def test_ids_beyond_any_integer_type_are_refused():
    with pytest.raises(InvalidRequest):
        make_req(arrival("a", [2**70]), limits(), 1)
