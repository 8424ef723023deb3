"""What clients wait for tokens: counted by bounds, told in heartbeats, added up over replicas and a sliding window.

Owns the bounds, which all replicas share, and the arithmetic of percentiles. Knows neither requests nor services.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

BOUNDS_S: Final[tuple[float, ...]] = tuple(0.001 * 1.5**i for i in range(28))
"""Upper bounds of the counts, 1 ms to a minute; the last count, which has no bound, is what took longer."""
_NUM_COUNTS: Final = len(BOUNDS_S) + 1

Counts = list[int]


class Waits:
    """The counters of one replica; they only grow.

    Attributes:
        num_said: tokens handed to clients.
        ttft: first tokens, by the time since their request came in.
        gap: chunks that follow another one of their stream, by the time since.
    """

    def __init__(self) -> None:
        self.num_said = 0
        self.ttft: Counts = [0] * _NUM_COUNTS
        self.gap: Counts = [0] * _NUM_COUNTS

    def first(self, seconds: float) -> None:
        """Count a first token."""
        self.ttft[bisect_left(BOUNDS_S, seconds)] += 1

    def next(self, seconds: float) -> None:
        """Count a gap."""
        self.gap[bisect_left(BOUNDS_S, seconds)] += 1


class Window:
    """The sum of the newest additions of counts.

    Args:
        size: how many additions are kept.
    """

    def __init__(self, size: int) -> None:
        self._kept: deque[Counts] = deque(maxlen=size)
        self.sum: Counts = [0] * _NUM_COUNTS

    def add(self, counts: Counts) -> None:
        """Take in an addition; the oldest goes when there are more than `size`."""
        oldest = self._kept[0] if len(self._kept) == self._kept.maxlen else ()
        self._kept.append(counts)
        self.sum = grown(added(self.sum, counts), oldest)

    def percentile(self, share: float) -> float | None:
        """Give the time, in seconds, that this share of the counted took at most. None: nothing was counted."""
        return percentile(self.sum, share)


def added(one: Sequence[int], other: Sequence[int]) -> Counts:
    """Add counts. A heartbeat without any is taken for zeros, and a replica's of other bounds as far as they go."""
    return [(one[i] if i < len(one) else 0) + (other[i] if i < len(other) else 0) for i in range(_NUM_COUNTS)]


def grown(now: Sequence[int], before: Sequence[int]) -> Counts:
    """Give by how much counts have grown."""
    return [max(0, n) for n in added(now, [-count for count in before])]


def percentile(counts: Sequence[int], share: float) -> float | None:
    """Find a percentile in counts, as if those of one bound lay evenly between it and the one below.

    Args:
        counts: one per bound, and one beyond.
        share: 0.5 for the median.

    Returns:
        Seconds; None if nothing is counted. What took longer than the last bound is taken for just that long.
    """
    rank = share * sum(counts)
    if not rank:
        return None
    below = 0
    for count, (low, high) in zip(counts, pairwise((0.0, *BOUNDS_S)), strict=False):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return BOUNDS_S[-1]
