"""What clients wait: counts, windows, percentiles."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.api.waits import BOUNDS_S, Waits, Window, added, grown, percentile

counts = st.lists(st.integers(0, 10_000), min_size=len(BOUNDS_S) + 1, max_size=len(BOUNDS_S) + 1)


def test_percentiles_lie_within_a_bound_of_the_truth() -> None:
    chance = random.Random(3)
    seconds = [chance.lognormvariate(-3, 1) for _ in range(5000)]
    waits = Waits()
    for value in seconds:
        waits.first(value)
    for share in (0.1, 0.5, 0.95, 0.99):
        truth = sorted(seconds)[int(share * len(seconds))]
        found = percentile(waits.ttft, share)
        assert found is not None and truth / 1.5 <= found <= truth * 1.5
    assert waits.gap == [0] * len(waits.gap)


def test_nothing_counted_has_no_percentile_and_what_is_beyond_the_last_bound_is_named_by_it() -> None:
    waits = Waits()
    assert percentile(waits.gap, 0.5) is None
    waits.next(1e6)
    assert percentile(waits.gap, 0.5) == BOUNDS_S[-1]


def test_a_window_holds_the_newest_additions() -> None:
    window, one = Window(3), [1] * (len(BOUNDS_S) + 1)
    for _ in range(5):
        window.add(one)
    assert window.sum == [3] * len(one)
    window.add([0] * len(one))
    assert window.sum == [2] * len(one)


@given(counts, counts)
def test_counts_grow_by_what_was_added(before: list[int], more: list[int]) -> None:
    assert grown(added(before, more), before) == more


@pytest.mark.parametrize("told", [[], [1, 2], [1] * 99])
def test_counts_of_another_release_do_no_harm(told: list[int]) -> None:
    assert len(added(told, ())) == len(BOUNDS_S) + 1
    assert added(told, ())[:2] == [*told, 0, 0][:2]
