"""The scheduler: which requests run, in which slots, on which pages; one Batch at a time.

Owns slots, pages and order. It is pure: no clock, no thread, no broker, no tensor; the loop calls it from one
thread. A step is planned with `plan`, launched by the loop, and settled with `settle`, in order; between
the two up to two steps are in flight, and nothing that they refer to is given to anyone else.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.batch import Batch, IntArray, MaskArray, StepResult
from services.scheduler.core.config import SchedulerConfig, SchedulerStats
from services.scheduler.core.cost_model import CostModel, StepShape
from services.scheduler.core.decode import DecodeSet
from services.scheduler.core.finish import FinishRules
from services.scheduler.core.guides import Grammars, Guides
from services.scheduler.core.layout import lay_out
from services.scheduler.core.link import Arrival, Load, StepOutput
from services.scheduler.core.outputs import begin_answers, drawn_output, unseen_output
from services.scheduler.core.page_table import PageTable
from services.scheduler.core.ports import EngineLimits
from services.scheduler.core.prefill import Prefill
from services.scheduler.core.prefix_cache import NaiveCache
from services.scheduler.core.radix_tree import RadixTree
from services.scheduler.core.req import Failure, Req, make_req
from services.scheduler.core.scoring import keep_scores
from services.scheduler.core.slots import SlotTable
from shared.errors import ConfigError, InvalidRequest, RequestError, ServerFault
from shared.messages import FinishReason

MAX_PATIENCE = 4.0
"""Running requests bear gaps that are so many times as long, when so many times as many wait to start: after a burst
small chunks, which cost more per token, would keep most of it waiting for the sake of the few that came first."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step between plan and settle."""

    step: int
    shape: StepShape


class Scheduler:
    """Plans steps for one engine. See the module docstring for the calling order.

    Args:
        limits: of the engine.
        config: policy.
        grammars: makes matchers for answers that must follow a grammar; without it they are refused.

    Raises:
        ConfigError: the engine's step is smaller than its batch.
    """

    def __init__(
        self, limits: EngineLimits, config: SchedulerConfig | None = None, grammars: Grammars | None = None
    ) -> None:
        if limits.max_step_tokens < limits.max_running:
            raise ConfigError(
                f"max_step_tokens is {limits.max_step_tokens}: each of max_running={limits.max_running} needs one"
            )
        self.limits = limits
        self.config = config or SchedulerConfig()
        self.stats = SchedulerStats()
        keeps = self.config.cache == "radix"
        self.slots = SlotTable(limits)
        self.pages = PageTable(limits, RadixTree(limits.page_size) if keeps else NaiveCache())
        self.prefill = Prefill(self.slots, self.pages, shares=keeps)
        self.decode = DecodeSet(self.slots, self.pages)
        self.guides = Guides(self.slots, limits.vocab_size, grammars)
        self._rules = FinishRules(limits)
        self._costs = CostModel()
        self._reqs: dict[str, Req] = {}
        self._flights: deque[_Flight] = deque()
        self._num_arrivals = 0
        self._next_step = 0
        self._settled_step = -1
        self._failures: list[Failure] = []
        self._endings: list[tuple[Req, FinishReason]] = []

    def add(self, arrival: Arrival) -> None:
        """Take a request; what cannot run or has all been said shows up in `take_failures` or `take_endings`.

        A uid of a lower attempt is replaced; one of the same or a higher attempt makes the arrival void.
        """
        uid = arrival.request.uid
        present = self._reqs.get(uid)
        if present is not None:
            if present.attempt >= arrival.attempt:
                return
            self.forget(uid, present.attempt)
        self._num_arrivals += 1
        try:
            req = make_req(arrival, self.limits, self._num_arrivals)
            finish = self._rules.of(req)
            if finish is not None and not req.is_scored:
                self._end_unseen(req, finish)
                return
            if req.params.grammar is not None and finish is None:
                self.guides.begin(req, req.params.grammar)
            else:
                self.prefill.ready.add(req)
        except RequestError as e:
            self.stats.refused += 1
            self._failures.append(Failure.of(uid, arrival.attempt, e))
            return
        self._reqs[uid] = req

    def forget(self, uid: str, attempt: int) -> bool:
        """Drop a request of at most this attempt; False when there is none. Nothing more is said of it."""
        req = self._reqs.get(uid)
        if req is None or req.attempt > attempt:
            return False
        self.stats.forgotten += 1
        if req.slot >= 0:
            self._end(req)
            return True
        if not self.guides.forget(req):
            self.prefill.ready.remove(req)
        del self._reqs[uid]
        return True

    def take_compiled(self) -> None:
        """Let requests go on whose grammar is compiled by now; those that cannot be show up in `take_failures`."""
        for req, error in self.guides.take():
            matcher = req.matcher
            if error is not None:
                self.stats.refused += 1
                self._failures.append(Failure.of(req.uid, req.attempt, error))
                del self._reqs[req.uid]
            elif matcher is not None and matcher.complete and len(req.output_ids):
                del self._reqs[req.uid]
                self._end_unseen(req, "stop")
            else:
                self.prefill.ready.add(req)

    def take_failures(self) -> list[Failure]:
        """Take the requests that ended with an error since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def take_endings(self, stamp_ns: int) -> StepOutput | None:
        """Take the requests that ended without a token since the last call: all of them was said before."""
        endings, self._endings = self._endings, []
        return unseen_output(endings, stamp_ns)

    def plan(self) -> Batch | None:
        """Fill the next step.

        Returns:
            The batch to launch, or None when nothing can run: at all if no step is in flight, else before the oldest
            one is settled.
        """
        if not self._make_room():
            return None
        step = self._next_step
        rows, starts = self.decode.advance(step)
        shape = StepShape(len(rows), int(starts.sum()), 0, 0.0)
        chunks, started = self.prefill.plan(self._prefill_budget(shape), step)
        if not len(rows) and not chunks:
            return None
        batch = lay_out(self.slots, self.pages, step, (rows, starts), chunks, started)
        for chunk in chunks:
            if chunk.completes and chunk.req.known_len + 1 < chunk.req.end_len:
                self.decode.add(chunk.req.slot)
        self._next_step += 1
        prefill_tokens = sum(chunk.length for chunk in chunks)
        reads = sum(chunk.length * (chunk.start + chunk.length / 2) for chunk in chunks)
        kv = sum(chunk.start + chunk.length for chunk in chunks)
        self._flights.append(_Flight(step, StepShape(len(rows), shape.decode_kv, prefill_tokens, reads, kv)))
        self.prefill.headroom.relax()
        self._count_admissions()
        return batch

    def settle(self, batch: Batch, result: StepResult, stamp_ns: int) -> StepOutput | None:
        """Take in what a step drew, in the order of `plan`; None when it drew nothing to be said.

        Rows of requests that ended or were forgotten while the step ran are dropped.
        """
        flight = self._flights.popleft()
        assert flight.step == batch.step, f"step {batch.step} settled before step {flight.step}"
        self._settled_step = batch.step
        self._costs.observe(flight.shape, result.forward_ms)
        self.pages.retire(batch.step)
        self.slots.retire(batch.step)
        ends = batch.starts + batch.lengths
        alive = self.slots.taken[batch.slots]
        self.slots.settled_len[batch.slots[alive]] = ends[alive]
        bad = alive & (result.bad | (batch.sample & (result.token_ids < 0)))
        if bad.any():
            self._fail_rows(batch.slots[bad])
            alive &= ~bad
        for req in keep_scores(batch, result, alive, self.slots) if batch.scores else ():
            self._first_token(req)
            self._end(req)
            self._end_unseen(req, "length")
        if len(batch.guided):
            for req in self.guides.follow(batch, result, alive, self._rules):
                self._lose_guide(req)
        drawn = np.flatnonzero(alive & batch.sample).astype(np.int32)
        if not len(drawn):
            return None
        return self._say(batch, result, drawn, ends[drawn], stamp_ns)

    def masks(self, batch: Batch) -> MaskArray:
        """Make the masks of a launched step's guided rows; every step before it must be settled."""
        masks, lost = self.guides.masks(batch)
        for req in lost:
            self._lose_guide(req)
        return masks

    def load(self, tokens_per_s: float = 0.0) -> Load:
        """Say how much runs and how much more could."""
        return Load(
            num_running=self.slots.num_taken,
            num_ready=len(self.prefill.ready) + self.guides.num_compiling,
            free_slots=0 if self.prefill.blocked else self.slots.num_slots - self.slots.num_taken,
            free_pages=self.pages.num_available,
            queued_tokens=self.prefill.ready.num_tokens,
            tokens_per_s=tokens_per_s,
        )

    def check(self) -> None:
        """Check that slots, pages and pins are whole; AssertionError says which is not. For tests and idle time."""
        self.slots.check()
        self.pages.check()
        live, ready = self.slots.live(), [*self.prefill.ready, *self.guides.compiling]
        assert {*live, *ready} == {*self._reqs.values()}, "a request is in no place"
        assert len(live) + len(ready) == len(self._reqs), "a request is in two places"
        self.decode.check()

    def _make_room(self) -> bool:
        """Get each decode row a page for its next token, by retraction if need be; False: settle a step first.

        A request is retracted only when everything is settled, so that no token of it is under way; the oldest always
        stays, and alone it fits, so every round makes progress.
        """
        while not self.decode.reserve():
            if self._flights:
                return False
            victim = max(self.slots.live(), key=lambda req: req.order)
            victim.token_ids = self.slots.tokens(victim.slot, int(self.slots.known_len[victim.slot])).copy()
            self._release(victim)
            victim.scores.clear()
            self.prefill.ready.add(victim)
            self.prefill.headroom.widen()
            self.stats.retractions += 1
        return True

    def _prefill_budget(self, decode: StepShape) -> int:
        budget = min(self.config.max_prefill_tokens, self.limits.max_step_tokens - decode.decode_rows)
        if decode.decode_rows:
            depth = self.prefill.running[0].planned_len if self.prefill.running else 0
            timed = self._costs.prefill_budget(decode, depth, self._gap_ratio(decode.decode_rows))
            budget = budget if timed is None else min(budget, timed)
        return budget

    def _gap_ratio(self, running: int) -> float:
        """How much longer prompts may make a step: the more of them wait for each request that runs, the longer."""
        ready = 0 if self.prefill.blocked else min(len(self.prefill.ready), self.slots.num_free)
        waiting = len(self.prefill.running) + ready
        return self.config.max_gap_ratio * min(MAX_PATIENCE, max(1.0, waiting / running))

    def _say(self, batch: Batch, result: StepResult, drawn: IntArray, positions: IntArray, stamp_ns: int) -> StepOutput:
        """Take in the drawn tokens of some rows and end the choices that they finish."""
        table = self.slots
        slots, ids = batch.slots[drawn], result.token_ids[drawn]
        table.token_ids[slots, positions] = ids
        table.known_len[slots] = positions + 1
        first = int(np.searchsorted(drawn, batch.num_decode))
        begun = {place: table.req(int(slots[place])) for place in range(first, len(drawn))}
        for req in begun.values():
            self._first_token(req)
            self.stats.prompt_tokens += 0 if req.announced else req.prompt_len
        starts, prompts = begin_answers(begun)
        finishes = self._rules.of_rows(table, slots, ids, positions + 1)
        complete = self._rules.complete_rows(table, slots, ids, positions + 1, finishes)
        output = drawn_output(table, batch, result, drawn, stamp_ns, starts, prompts, finishes, complete)
        for place, finish in finishes.items():
            self._end(table.req(int(slots[place])))
            self.stats.finished[finish] += 1
        self.stats.generated_tokens += len(drawn)
        return output

    def _lose_guide(self, req: Req) -> None:
        """End a request whose grammar has become too hard to follow."""
        self._end(req)
        field = req.params.grammar.field if req.params.grammar is not None else None
        message = "The grammar of the answer is too complex to be followed."
        error = InvalidRequest(message, param=field, code="grammar_too_complex")
        self._failures.append(Failure.of(req.uid, req.attempt, error))

    def _end_unseen(self, req: Req, finish: FinishReason) -> None:
        """Have a request end without a token; it is in no place any more."""
        self._endings.append((req, finish))
        self.stats.finished[finish] += 1

    def _first_token(self, req: Req) -> None:
        """A prompt has been computed whole, and soundly: share it at once with those that begin alike."""
        req.verified = True
        self.prefill.drop(req)
        self._share(req)

    def _fail_rows(self, slots: IntArray) -> None:
        """End requests whose logits were not numbers; nothing of them enters the cache."""
        error = ServerFault("The model computed no valid numbers for this request.", code="bad_logits")
        for slot in slots.tolist():
            req = self.slots.req(slot)
            req.verified = False
            self._end(req)
            self.stats.bad_rows += 1
            self._failures.append(Failure.of(req.uid, req.attempt, error))

    def _share(self, req: Req) -> None:
        """Give what settled steps have computed of a request to the prefix cache."""
        slot = req.slot
        tokens = self.slots.tokens(slot, int(self.slots.settled_len[slot]))
        self.pages.share(slot, req.namespace, tokens, int(self.slots.last_step[slot]), self._settled_step)

    def _end(self, req: Req) -> None:
        """A request with a slot has ended."""
        self._release(req)
        del self._reqs[req.uid]

    def _release(self, req: Req) -> None:
        """Take a request's slot and pages, and keep its sound KV in the cache."""
        slot = req.slot
        if req.verified:
            self._share(req)
        self.prefill.drop(req)
        self.decode.remove(slot)
        self.pages.close(slot, int(self.slots.last_step[slot]), self._settled_step)
        self.slots.take_back(req, self._settled_step)

    def _count_admissions(self) -> None:
        self.stats.cache_query_tokens = self.prefill.num_query_tokens
        self.stats.cache_hit_tokens = self.prefill.num_hit_tokens
        self.stats.evicted_pages = self.pages.num_evicted
