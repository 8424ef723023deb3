"""The slot table: what changes with every step, as arrays by slot, so that no step loops over its rows.

Owns the free slots and, for each taken one, its tokens and lengths:

    token_ids[slot]   [ prompt ..... | tokens drawn ..... | (unknown)        ]
    known_len                                              ^ tokens known to the host
    settled_len                                        ^ tokens whose KV settled steps have computed
    planned_len                                              ^ ... launched steps will have computed

In a steady decode known_len = settled_len + 1, and planned_len is one more per step in flight. A slot that a
launched step refers to is not given away before that step has retired.
"""

from collections import deque

import numpy as np

from services.scheduler.core.batch import BoolArray, IntArray
from services.scheduler.core.ports import EngineLimits
from services.scheduler.core.req import Req


class SlotTable:
    """See the module. `taken` is False from the moment a request has lost its slot, whatever is still in flight."""

    def __init__(self, limits: EngineLimits) -> None:
        num = limits.max_running
        self.num_slots = num
        self.token_ids: IntArray = np.zeros((num, limits.max_seq_len), np.int32)
        self.known_len: IntArray = np.zeros(num, np.int32)
        self.settled_len: IntArray = np.zeros(num, np.int32)
        self.planned_len: IntArray = np.zeros(num, np.int32)
        self.prompt_len: IntArray = np.zeros(num, np.int32)
        self.end_len: IntArray = np.zeros(num, np.int32)
        self.min_len: IntArray = np.zeros(num, np.int32)
        self.last_step: IntArray = np.full(num, -1, np.int32)
        self.ignores_eos: BoolArray = np.zeros(num, np.bool_)
        self.has_stop_ids: BoolArray = np.zeros(num, np.bool_)
        self.is_guided: BoolArray = np.zeros(num, np.bool_)
        self.is_complete: BoolArray = np.zeros(num, np.bool_)
        self.taken: BoolArray = np.zeros(num, np.bool_)
        self.uids = np.empty(num, np.object_)
        self.attempts = np.zeros(num, np.int64)
        self.reqs: list[Req | None] = [None] * num
        self._free = list(range(num - 1, -1, -1))
        self._quarantine: deque[tuple[int, int]] = deque()

    @property
    def num_free(self) -> int:
        """Slots that can be given now."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Requests that have a slot."""
        return self.num_slots - len(self._free) - len(self._quarantine)

    def give(self, req: Req, cached_len: int) -> int:
        """Give a request a slot; KV of its first `cached_len` tokens is there already."""
        slot = self._free.pop()
        known_len, prompt_len = req.known_len, req.prompt_len
        self.token_ids[slot, :known_len] = req.token_ids
        self.known_len[slot] = known_len
        self.settled_len[slot] = self.planned_len[slot] = cached_len
        self.prompt_len[slot] = prompt_len
        self.end_len[slot] = req.end_len
        self.min_len[slot] = prompt_len + max(0, req.params.min_tokens)
        self.last_step[slot] = -1
        self.ignores_eos[slot] = req.params.ignore_eos
        self.has_stop_ids[slot] = bool(req.params.stop_token_ids)
        self.is_guided[slot] = req.params.grammar is not None
        self.is_complete[slot] = False
        self.taken[slot] = True
        self.uids[slot] = req.uid
        self.attempts[slot] = req.attempt
        self.reqs[slot] = req
        req.slot, req.planned_len, req.verified = slot, cached_len, False
        return slot

    def take_back(self, req: Req, settled_step: int) -> None:
        """Take a request's slot; it is free once the last step that has a row of it has retired."""
        slot = req.slot
        self.taken[slot] = False
        self.uids[slot] = self.reqs[slot] = None
        req.slot = -1
        if self.last_step[slot] > settled_step:
            self._quarantine.append((int(self.last_step[slot]), slot))
        else:
            self._free.append(slot)

    def retire(self, step: int) -> None:
        """Free what was held back for steps up to `step`."""
        for _ in range(len(self._quarantine)):
            until, slot = self._quarantine.popleft()
            if until <= step:
                self._free.append(slot)
            else:
                self._quarantine.append((until, slot))

    def req(self, slot: int) -> Req:
        """The request in a taken slot."""
        req = self.reqs[slot]
        assert req is not None, f"slot {slot} is not taken"
        return req

    def live(self) -> list[Req]:
        """Every request that has a slot."""
        return [req for req in self.reqs if req is not None]

    def tokens(self, slot: int, length: int) -> IntArray:
        """The first tokens of a slot; a view, good until the slot is given away."""
        view: IntArray = self.token_ids[slot, :length]
        return view

    def check(self) -> None:
        """Check that every slot is free, taken or held back, once; AssertionError says which is not."""
        held = sorted([*self._free, *(slot for _, slot in self._quarantine), *np.flatnonzero(self.taken).tolist()])
        assert held == list(range(self.num_slots)), f"slots are lost or doubled: {held}"
        for req in self.live():
            assert self.reqs[req.slot] is req and self.taken[req.slot], f"slot {req.slot} is not its request's"
        slots = np.flatnonzero(self.taken)
        settled, planned, known = self.settled_len[slots], self.planned_len[slots], self.known_len[slots]
        assert (settled <= planned).all() and (settled <= known).all() and (planned <= known + 1).all(), "lengths"
        assert (known <= self.end_len[slots]).all(), "a choice is longer than it may be"
