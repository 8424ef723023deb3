"""The page pool: who holds each KV page. Numbers only; the tensors behind the pages are the engine's.

A page is in exactly one state, and every move between states is checked, so a double free or a page given to two
owners is found where it happens:

    FREE -alloc-> LIVE -to_cache-> CACHED -free-> FREE
                  LIVE -free-> FREE
                  LIVE -quarantine(step)-> QUARANTINED -retire(step)-> FREE

A page that a launched step may still read or write is not freed but quarantined until that step has retired.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch import IntArray

FREE, LIVE, CACHED, QUARANTINED = 0, 1, 2, 3
_STATE_NAMES = ("free", "live", "cached", "quarantined")


class PageFault(RuntimeError):
    """A page was moved from a state that it is not in: the books are wrong, and going on would corrupt answers."""


class PagePool:
    """The states of pages 0 .. num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._state = np.zeros(num_pages, np.int8)
        # A stack whose top is at num_free: pages 0, 1, 2, ... are given first.
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._quarantine: deque[tuple[int, IntArray]] = deque()

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can give."""
        return self._num_free

    @property
    def num_quarantined(self) -> int:
        """Pages that wait for a step to retire."""
        return sum(len(pages) for _, pages in self._quarantine)

    def count(self, state: int) -> int:
        """Count the pages in a state, from the books of each page."""
        return int(np.count_nonzero(self._state == state))

    def states(self, pages: IntArray) -> npt.NDArray[np.int8]:
        """State of each of some pages."""
        states: npt.NDArray[np.int8] = self._state[pages]
        return states

    def alloc(self, num: int) -> IntArray:
        """Take `num` free pages; they are the caller's until freed, quarantined or given to the cache.

        Raises:
            PageFault: there are fewer than `num`.
        """
        if num > self._num_free:
            raise PageFault(f"{num} pages wanted, {self._num_free} free")
        self._num_free -= num
        pages = self._stack[self._num_free : self._num_free + num][::-1].copy()
        self._move(pages, LIVE, FREE)
        return pages

    def to_cache(self, pages: IntArray) -> None:
        """Hand live pages over to the prefix cache."""
        self._move(pages, CACHED, LIVE)

    def free(self, pages: IntArray) -> None:
        """Take back live pages, or pages that the cache gave up, that no launched step refers to."""
        self._move(pages, FREE, LIVE, CACHED)
        self._push(pages)

    def quarantine(self, pages: IntArray, step: int) -> None:
        """Take back live pages that launched steps up to `step` refer to."""
        if len(pages) == 0:
            return
        self._move(pages, QUARANTINED, LIVE)
        self._quarantine.append((step, pages))

    def retire(self, step: int) -> None:
        """Free what was held back for steps up to `step`."""
        kept: deque[tuple[int, IntArray]] = deque()
        for until, pages in self._quarantine:
            if until > step:
                kept.append((until, pages))
                continue
            self._move(pages, FREE, QUARANTINED)
            self._push(pages)
        self._quarantine = kept

    def check(self) -> None:
        """Check that the stack, the quarantine and the states agree; AssertionError says what does not."""
        free = np.sort(self._stack[: self._num_free])
        assert np.array_equal(free, np.flatnonzero(self._state == FREE)), "free pages differ from the stack"
        held = [pages for _, pages in self._quarantine]
        quarantined = np.sort(np.concatenate(held)) if held else np.empty(0, np.int32)
        assert np.array_equal(quarantined, np.flatnonzero(self._state == QUARANTINED)), "quarantine differs"

    def _push(self, pages: IntArray) -> None:
        self._stack[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)

    def _move(self, pages: IntArray, to: int, *allowed: int) -> None:
        before = self._state[pages]
        wrong = np.logical_and.reduce([before != state for state in allowed])
        if wrong.any():
            page = int(pages[wrong][0])
            raise PageFault(f"page {page} is {_STATE_NAMES[self._state[page]]}, cannot become {_STATE_NAMES[to]}")
        if len(set(pages.tolist())) != len(pages):
            raise PageFault(f"a page is named twice on its way to {_STATE_NAMES[to]}")
        self._state[pages] = to
