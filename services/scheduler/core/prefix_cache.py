"""The prefix cache protocol: pages of computed prefixes that later requests may share; and a cache that keeps none.

A cache owns the pages it was given until `evict` gives them up. It deals in whole pages: a prefix is cached up
to the last full page. A handle pins a prefix while it is locked; whoever locks it unlocks it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.scheduler.core.batch import IntArray

NO_PAGES: IntArray = np.empty(0, np.int32)


class PrefixHandle(Protocol):
    """A place in a cache: the prefix from the start to there. Opaque to everyone else."""

    @property
    def num_pages(self) -> int:
        """Pages of the prefix."""
        ...


@dataclass(frozen=True, slots=True)
class Insertion:
    """Outcome of `insert`.

    Attributes:
        handle: the prefix as it is cached now; not locked.
        known: (k,) the cache's own pages of the part that was cached already. Where the caller has others in those
            places they are duplicates and still the caller's.
        taken: (t,) the caller's pages behind that part: they are the cache's now.
    """

    handle: PrefixHandle
    known: IntArray
    taken: IntArray


class PrefixCache(Protocol):
    """What the scheduler asks of a cache. `namespace` separates prefixes that must never be shared."""

    @property
    def num_pages(self) -> int:
        """Pages it owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages it owns that nobody has locked."""
        ...

    def match(self, namespace: str, token_ids: IntArray) -> tuple[PrefixHandle, IntArray]:
        """Find the longest cached prefix.

        Returns:
            Its handle, not locked, and its pages (num_pages,), which stay the cache's.
        """
        ...

    def insert(self, namespace: str, token_ids: IntArray, pages: IntArray) -> Insertion:
        """Cache a computed prefix.

        Args:
            namespace: see the class.
            token_ids: (n,) ids; those behind the last full page are ignored.
            pages: (at least n // page_size,) the pages that hold them, in order.
        """
        ...

    def lock(self, handle: PrefixHandle) -> None:
        """Pin a prefix; counts."""
        ...

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`."""
        ...

    def evict(self, num: int) -> IntArray:
        """Give up at most `num` pages, least recently used first; they are the caller's to free."""
        ...

    def check(self) -> None:
        """Check its own books; AssertionError says what is wrong."""
        ...


@dataclass(frozen=True, slots=True)
class _Nothing:
    """Handle of the empty prefix."""

    num_pages: int = 0


class NaiveCache:
    """A cache that keeps nothing: every prompt is computed from its first token."""

    num_pages = 0
    num_evictable = 0

    def match(self, namespace: str, token_ids: IntArray) -> tuple[PrefixHandle, IntArray]:
        """Find nothing."""
        return _Nothing(), NO_PAGES

    def insert(self, namespace: str, token_ids: IntArray, pages: IntArray) -> Insertion:
        """Take nothing."""
        return Insertion(_Nothing(), NO_PAGES, NO_PAGES)

    def lock(self, handle: PrefixHandle) -> None:
        """Pin nothing."""

    def unlock(self, handle: PrefixHandle) -> None:
        """Unpin nothing."""

    def evict(self, num: int) -> IntArray:
        """Have nothing to give."""
        return NO_PAGES

    def check(self) -> None:
        """Have no books."""
