"""Prefill: who starts next, and how much of each prompt the next step computes.

Requests without a slot are ready, in order of priority and arrival; a retracted one keeps its old place and so comes
before those that arrived after it. Nobody overtakes the head of the line, so a long prompt is never starved. A prompt
is admitted whole: its pages are taken at once, so a chunk never fails half way for lack of them.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.page_table import PageTable
from services.scheduler.core.req import Req
from services.scheduler.core.slots import SlotTable

TWIN_MIN_TOKENS = 64
"""A prompt shorter than this is computed twice rather than waiting for its twin."""

LARGE = 1 << 62
"""Longer than any prompt."""

MIN_LOOKAHEAD, MAX_LOOKAHEAD = 16.0, 4096.0
WIDEN, RELAX = 1.5, 0.99
"""Per retraction, and per step. Slower forgetting saves recomputation, but leaves slots empty for longer."""


class ReadyList:
    """Requests that have no slot, in the order in which they will get one."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        """Put a request in its place."""
        bisect.insort(self._reqs, req, key=_order)

    def remove(self, req: Req) -> None:
        """Take a request out."""
        self._reqs.remove(req)

    @property
    def num_tokens(self) -> int:
        """Tokens that must be computed before all of them have started."""
        return sum(req.known_len for req in self._reqs)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prompt that the next step computes."""

    req: Req
    start: int
    length: int

    @property
    def completes(self) -> bool:
        """Whether nothing of the prompt is left behind it."""
        return self.start + self.length == self.req.known_len

    @property
    def draws(self) -> bool:
        """Whether a token is drawn behind it."""
        return self.completes and self.req.known_len < self.req.end_len


class Headroom:
    """How many pages to leave for the rows that run, so that admission does not cause retraction.

    Each running row is given credit for the next `lookahead` tokens. A retraction shows that this was too few and
    widens it; steps without one bring it slowly back.
    """

    def __init__(self, slots: SlotTable, pages: PageTable) -> None:
        self._slots = slots
        self._pages = pages
        self._lookahead = MIN_LOOKAHEAD

    def widen(self) -> None:
        """A request was retracted."""
        self._lookahead = min(MAX_LOOKAHEAD, self._lookahead * WIDEN)

    def relax(self) -> None:
        """A step went by without."""
        self._lookahead = max(MIN_LOOKAHEAD, self._lookahead * RELAX)

    def num_pages(self) -> int:
        """Pages that running requests will want soon."""
        table, size = self._slots, self._pages.page_size
        slots = np.flatnonzero(table.taken)
        have = self._pages.num_pages[slots] * size
        length = np.maximum(table.planned_len[slots], table.known_len[slots])
        want = np.minimum(length + int(self._lookahead), table.end_len[slots] - 1)
        return int(((np.maximum(want - have, 0) + size - 1) // size).sum())


class Prefill:
    """Requests on their way to their first token: ready, then computing their prompt chunk by chunk.

    Attributes:
        ready: requests without a slot.
        running: requests with one whose prompt is not planned whole, oldest first.
        blocked: the next in line found too few pages in the last plan.
        headroom: pages left for those that run.
        num_query_tokens: tokens of all prompts admitted, and of these `num_hit_tokens` came from the prefix cache.
    """

    def __init__(self, slots: SlotTable, pages: PageTable, *, shares: bool) -> None:
        self.ready = ReadyList()
        self.running: list[Req] = []
        self.headroom = Headroom(slots, pages)
        self.num_hit_tokens = 0
        self.num_query_tokens = 0
        self.blocked = False
        self._slots = slots
        self._pages = pages
        self._shares = shares
        self._twins: dict[int, Req] = {}

    def plan(self, budget: int, step: int) -> tuple[list[Chunk], list[Req]]:
        """Choose the chunks of a step.

        Args:
            budget: tokens to compute at most.
            step: the step; slots with a chunk are referred to by it.

        Returns:
            The chunks, and the requests that got their slot just now.
        """
        started: list[Req] = []
        chunks: list[Chunk] = []
        grants, left = self._share_out(budget)
        self.blocked = False
        for req in list(self.ready):
            if left <= 0 or not self._slots.num_free:
                break
            if self._waits(req):
                continue
            if not self._admit(req):
                self.blocked = True
                break
            started.append(req)
            grants.append(min(left, req.known_len - req.planned_len))
            left -= grants[-1]
        for req, grant in zip(self.running, grants, strict=True):
            extra = min(left, req.known_len - req.planned_len - grant)
            left -= extra
            if grant + extra:
                chunks.append(self._cut(req, grant + extra, step))
        self.running = [req for req in self.running if req.planned_len < req.known_len]
        return chunks, started

    def drop(self, req: Req) -> None:
        """Forget a request that gives up its slot, or whose prompt is in the cache by now."""
        if self._twins.get(req.twin_key) is req:
            del self._twins[req.twin_key]
        if req in self.running:
            self.running.remove(req)

    def _share_out(self, budget: int) -> tuple[list[int], int]:
        """Divide a budget between the prompts under way, oldest first.

        A prompt that this step will not complete anyway takes only half of what is left while a much shorter one is
        behind it: so short prompts need not wait for a very long one, and the long one never stands still.

        Returns:
            Tokens for each of `running`, and what is left for newcomers.
        """
        wants = [req.known_len - req.planned_len for req in self.running]
        head = next((req.known_len for req in self.ready if not self._waits(req)), None)
        if not self._slots.num_free or head is None:
            head = LARGE
        grants, left = [], budget
        for i, want in enumerate(wants):
            yields = want > left and min([*wants[i + 1 :], head]) < want // 2
            grants.append(min(want, -(-left // 2) if yields else left))
            left -= grants[-1]
        return grants, left

    def _cut(self, req: Req, length: int, step: int) -> Chunk:
        chunk = Chunk(req, req.planned_len, length)
        req.planned_len += length
        self._slots.planned_len[req.slot] = req.planned_len
        self._slots.last_step[req.slot] = step
        return chunk

    def _admit(self, req: Req) -> bool:
        """Give a request a slot and the pages of its prompt, if they can be had without robbing those that run."""
        # At least the last token is computed: its logits are what the next token is drawn from. All are, if scored.
        usable = 0 if req.is_scored else req.known_len - 1
        handle, cached = self._pages.pin(req.namespace, req.token_ids[:usable])
        need = self._pages.pages_for(req.known_len) - len(cached)
        # With nobody running nobody can be robbed, and what is held back comes free by itself.
        spare = self.headroom.num_pages() if self._slots.taken.any() else 0
        if need + spare > self._pages.num_available:
            self._pages.unpin(handle)
            return False
        cached_len = len(cached) * self._pages.page_size
        slot = self._slots.give(req, cached_len)
        self._pages.open(slot, handle, cached, req.known_len)
        self.ready.remove(req)
        self.running.append(req)
        self.num_query_tokens += req.known_len
        self.num_hit_tokens += cached_len
        if req.cached_len < 0:
            req.cached_len = min(cached_len, req.prompt_len)
        if self._shares and req.known_len - cached_len > max(TWIN_MIN_TOKENS, self._pages.page_size):
            self._twins.setdefault(req.twin_key, req)
        return True

    def _waits(self, req: Req) -> bool:
        """Whether a request lets others go first: the same prompt is being computed, and in a moment in the cache."""
        return req.twin_key in self._twins and not req.is_scored


def _order(req: Req) -> tuple[int, int]:
    return req.order
