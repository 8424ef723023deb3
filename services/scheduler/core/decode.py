"""The decode set: the slots that compute one token in every step.

Owns their order and nothing of them: longest first, which balances paged attention. All rows grow by one token a
step, so the order once made stays right, and a new slot is put in by bisection.
"""

import numpy as np

from services.scheduler.core.batch import IntArray
from services.scheduler.core.page_table import PageTable
from services.scheduler.core.slots import SlotTable


class DecodeSet:
    """Slots that decode. A slot leaves when its last token is planned, or when its request has gone."""

    def __init__(self, slots: SlotTable, pages: PageTable) -> None:
        self._slots = slots
        self._pages = pages
        self._order: IntArray = np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def order(self) -> IntArray:
        """The slots, longest first."""
        return self._order

    def add(self, slot: int) -> None:
        """Put in a slot whose prompt is planned whole."""
        lengths = self._slots.planned_len
        place = int(np.searchsorted(-lengths[self._order], -lengths[slot], side="right"))
        self._order = np.concatenate([self._order[:place], np.array([slot], np.int32), self._order[place:]])

    def remove(self, slot: int) -> None:
        """Take out a slot, if it is there."""
        self._order = self._order[self._order != slot]

    def reserve(self) -> bool:
        """Give every row a page for its next token; False, and nothing given, when there are not enough."""
        needy = self._pages.missing(self._order, self._slots.planned_len[self._order])
        if len(needy) > self._pages.num_available:
            return False
        self._pages.grow(needy)
        return True

    def advance(self, step: int) -> tuple[IntArray, IntArray]:
        """Plan one token of every row; rows whose last token this draws leave the set.

        Returns:
            The slots (rows,) and the positions they compute (rows,).
        """
        table, slots = self._slots, self._order
        starts = table.planned_len[slots]
        table.planned_len[slots] = starts + 1
        table.last_step[slots] = step
        goes_on = starts + 2 < table.end_len[slots]
        if not goes_on.all():
            self._order = slots[goes_on]
        return slots, starts

    def check(self) -> None:
        """Check that its slots are taken, once each, and longest first; AssertionError says which is not so."""
        assert len(np.unique(self._order)) == len(self._order), "a slot decodes twice"
        assert self._slots.taken[self._order].all(), "a slot decodes that nobody has"
        assert (np.diff(self._slots.planned_len[self._order]) <= 0).all(), "the decode set is not longest first"
