import pytest

from services.detokenizer.pieces import check_shape, sort_by_reply
from shared.errors import WireError
from shared.messages import LogprobEntry, StepChunk


def chunk(first: int, tokens: list[int], *, uid: str = "u", attempt: int = 7, stamp_ns: int = 1) -> StepChunk:
    return StepChunk("e", stamp_ns, [uid], [attempt], [first], tokens, [len(tokens)])


def found(*chunks: StepChunk) -> dict[str, list[tuple[int, int, list[int]]]]:
    return {uid: [(p.attempt, p.first, p.ids) for p in q] for uid, q in sort_by_reply(chunks).items()}


def test_steps_that_follow_each_other_are_one_piece() -> None:
    assert found(chunk(1, [5]), chunk(2, [6, 7]), chunk(4, [8])) == {"u": [(7, 1, [5, 6, 7, 8])]}


def test_a_gap_a_double_and_another_attempt_begin_a_new_piece() -> None:
    assert found(chunk(1, [5]), chunk(3, [6])) == {"u": [(7, 1, [5]), (7, 3, [6])]}
    assert found(chunk(1, [5]), chunk(1, [5])) == {"u": [(7, 1, [5]), (7, 1, [5])]}
    assert found(chunk(1, [5]), chunk(2, [6], attempt=8)) == {"u": [(7, 1, [5]), (8, 2, [6])]}


def test_nothing_joins_a_finished_piece() -> None:
    last = StepChunk("e", 1, ["u"], [7], [2], [6], finishes={0: "length"})
    queue = sort_by_reply([chunk(1, [5]), last, chunk(3, [9])])["u"]
    assert [(p.first, p.finish) for p in queue] == [(1, "length"), (3, None)]


def test_replies_of_one_step_are_told_apart_with_and_without_counts() -> None:
    plain = StepChunk("e", 1, ["a", "b"], [1, 2], [1, 1], [5, 6])
    counted = StepChunk("e", 1, ["a", "b", "c"], [1, 2, 3], [2, 2, 9], [7, 8, 9], [2, 1, 0], finishes={2: "stop"})
    assert found(plain, counted) == {"a": [(1, 1, [5, 7, 8])], "b": [(2, 1, [6, 9])], "c": [(3, 9, [])]}


def test_a_place_without_a_token_may_be_written_as_minus_one() -> None:
    assert found(StepChunk("e", 1, ["a"], [1], [4], [-1], finishes={0: "length"})) == {"a": [(1, 4, [])]}


def test_what_few_places_have_comes_along() -> None:
    entries = [LogprobEntry(5, -1.0), LogprobEntry(6, -2.0)]
    one = StepChunk("e", 1, ["a"], [1], [1], [5], starts={0: (9, 3)}, logprobs={0: entries[:1]})
    two = StepChunk("e", 2, ["a"], [1], [2], [6], finishes={0: "stop"}, logprobs={0: entries[1:]})
    [piece] = sort_by_reply([one, two])["a"]
    assert (piece.start, piece.logprobs, piece.finish, piece.stamp_ns) == ((9, 3), entries, "stop", 2)
    assert one.logprobs[0] == entries[:1], "the message itself is not changed"


@pytest.mark.parametrize(
    "bad",
    [
        StepChunk("e", 1, ["a"], [], [1], [5]),
        StepChunk("e", 1, ["a"], [1], [1], [5, 6]),
        StepChunk("e", 1, ["a"], [1], [1], [5], [2]),
        StepChunk("e", 1, ["a", "b"], [1, 1], [1, 1], [5], [1]),
        StepChunk("e", 1, ["a", "b"], [1, 1], [1, 1], [5], [2, -1]),
        StepChunk("e", 1, ["a"], [1], [1], [5], finishes={1: "stop"}),
        StepChunk("e", 1, ["a"], [1], [1], [5], starts={-1: (1, 1)}),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(bad: StepChunk) -> None:
    with pytest.raises(WireError, match="do not fit"):
        check_shape(bad)
