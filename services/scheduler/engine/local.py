"""The engine whose steps run one after the other on a thread: any device, plain torch, and the reference.

Owns the model, the KV pool, the sampler's state and the thread they run on. Knows slots, pages and steps;
knows neither requests, nor the broker, nor how a batch was chosen.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from services.scheduler.core.batch import Batch, MaskArray, SlotSetup, StepResult
from services.scheduler.core.ports import EngineFault, EngineLimits, Step
from services.scheduler.engine.attention.base import IndexArray
from services.scheduler.engine.attention.select import select_backend
from services.scheduler.engine.context import ForwardContext, PlannedAttention
from services.scheduler.engine.device import set_threads
from services.scheduler.engine.inputs import prepare
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.models.llama import Model
from services.scheduler.engine.parallel.comm import SOLO, Comm
from services.scheduler.engine.parallel.group import Followers, RankLost
from services.scheduler.engine.sampler import Guides, Sampler, score_tokens
from services.scheduler.engine.threads import spread
from shared.sampling import SamplingParams

_WARM_UP_TOKENS: Final = 16
_CLOSE_TIMEOUT_S: Final = 10.0
_LOST_TIMEOUT_S: Final = 1.0
_LARGE: Final = 1 << 20
"""Numbers to add up that torch divides between all its threads."""


class LocalStep:
    """A launched batch, and later its result."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.done = threading.Event()
        self.guided = threading.Event()
        self.masks: MaskArray | None = None
        self.result: StepResult | None = None
        self.fault: BaseException | None = None


class LocalEngine:
    """An Engine whose steps run in order on one thread of this process.

    torch gives the interpreter up inside each operation, so the scheduler goes on meanwhile.

    Attributes:
        progress: layers computed so far, so that a slow step is not taken for a dead engine.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: EngineLimits,
        attention_backend: str,
        threads: int,
        comm: Comm = SOLO,
        followers: Followers | None = None,
    ) -> None:
        """Take over what was loaded and start the thread.

        Args:
            model: with its weights.
            cache: the pool; nobody else writes to it.
            limits: what callers may ask for.
            attention_backend: "auto" or a name of `attention.select`.
            threads: threads of one operation on a CPU.
            comm: to the other ranks of the model.
            followers: those ranks, on CPUs; they end with the engine.
        """
        self.progress = 0
        self._comm = comm
        self._followers = followers
        self._model = model
        self._limits = limits
        self._threads = threads
        self._attention = select_backend(attention_backend, cache, model.dtype, model.device)
        self._sampler = Sampler(limits.max_running, limits.vocab_size, limits.eos_token_ids)
        self._last_tokens = torch.zeros(limits.max_running, dtype=torch.int64, device=model.device)
        self._steps: queue.SimpleQueue[LocalStep | None] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        self._running: LocalStep | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        if followers is not None:
            followers.watch(self._lose)

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        return self._limits

    def launch(self, batch: Batch) -> Step:
        """Start a step behind those already launched and return at once."""
        step = LocalStep(batch)
        self._steps.put(step)
        return step

    def guide(self, step: Step, masks: MaskArray) -> None:
        """Say what the guided rows of a launched step may draw; returns at once."""
        assert isinstance(step, LocalStep) and len(masks) == len(step.batch.guided)
        step.masks = masks
        step.guided.set()

    def wait(self, step: Step) -> StepResult:
        """Block, without holding the interpreter, until the step has retired.

        Raises:
            EngineFault: this step or one before it failed, or the engine is closed.
        """
        assert isinstance(step, LocalStep)
        step.done.wait()
        if step.result is None:
            raise EngineFault(f"step {step.batch.step} failed: {step.fault!r}") from step.fault
        return step.result

    def check(self) -> None:
        """See whether the engine can go on.

        Raises:
            EngineFault: a rank is lost.
        """
        if isinstance(self._fault, RankLost):
            raise EngineFault(str(self._fault)) from self._fault

    def close(self) -> None:
        """End the thread, after the step it is in. Steps behind that one fail."""
        if self._fault is None:
            self._fault = RuntimeError("the engine is closed")
        self._steps.put(None)
        if (running := self._running) is not None:
            running.guided.set()  # its masks will not come any more
        lost = isinstance(self._fault, RankLost)
        if self._followers is not None and lost:
            self._followers.close()  # a step that waits for a rank that is gone may wait for ever
        if threading.current_thread() is not self._thread:
            self._thread.join(_LOST_TIMEOUT_S if lost else _CLOSE_TIMEOUT_S)
        if self._followers is not None:
            self._followers.close()

    def warm_up(self) -> None:
        """Compute a prompt and a token once, so that no request pays for what torch prepares at first use.

        It writes to page 0 and slot 0 before anybody owns them.
        """
        length = min(_WARM_UP_TOKENS, self._limits.page_size, self._limits.max_seq_len - 1)
        ids = np.zeros(length, dtype=np.int32)
        setup = SlotSetup(0, SamplingParams(temperature=1.0), ids, ids[:0])
        for start, count in ((0, length), (length - 1, 1)):
            batch = Batch(
                step=0,
                num_decode=0,
                slots=np.zeros(1, dtype=np.int32),
                starts=np.array([start], dtype=np.int32),
                lengths=np.array([count], dtype=np.int32),
                input_ids=ids[:count],
                page_table=np.zeros((1, 1), dtype=np.int32),
                sample=np.ones(1, dtype=np.bool_),
                out_index=np.ones(1, dtype=np.int32),
                setups=(setup,),
            )
            self.wait(self.launch(batch))

    def _run(self) -> None:
        """The thread: one step after the other; after a fault every step fails."""
        if self._model.device.type == "cpu":
            set_threads(self._threads)
            spread(_operate, self._threads)
        with torch.inference_mode():
            while (step := self._steps.get()) is not None:
                self._running = step
                if self._fault is None:
                    try:
                        step.result = self._compute(step)
                    except BaseException as e:  # whatever it is, the device's state is not known any more
                        self._fault = e
                step.fault = self._fault
                step.done.set()
        # Whoever waits for a step that came too late must not wait for ever.
        while not self._steps.empty():
            if (step := self._steps.get()) is not None:
                step.fault = self._fault
                step.done.set()

    def _lose(self, lost: RankLost) -> None:
        """A rank has ended: nothing that was launched will retire. Any thread."""
        if self._fault is None:
            self._fault = lost
        if (running := self._running) is not None:
            running.fault = lost
            running.guided.set()
            running.done.set()

    def _compute(self, step: LocalStep) -> StepResult:
        batch, started = step.batch, time.perf_counter()
        if self._followers is not None:
            self._followers.send(batch)
        for setup in batch.setups:
            self._sampler.set_up(setup)
        inputs = prepare(batch, self._last_tokens, self._model.device)
        plan = self._attention.plan(inputs.attention)
        attention = _Counted(plan, self._advance)
        context = ForwardContext(inputs.positions, attention, inputs.logits_index, num_decode=batch.num_decode)
        hidden = self._model.forward(inputs.input_ids, context)
        rows = inputs.drawn_rows
        token_ids = np.full(batch.num_rows, -1, dtype=np.int32)
        bad = np.zeros(batch.num_rows, dtype=np.bool_)
        scores, first = {}, len(rows)
        for score in batch.scores:
            last = first + len(score.targets)
            scores[score.row], bad[score.row] = score_tokens(self._model.logits, hidden[first:last], score)
            first = last
        logprobs, waited = {}, 0.0
        if len(rows):
            logits = self._model.logits(hidden[: len(rows)])
            waited = -time.perf_counter()
            guides = self._guides(step, rows)
            waited += time.perf_counter()
            draws = self._sampler.draw(logits, batch.slots[rows], batch.out_index[rows], guides)
            slots = torch.from_numpy(batch.slots[rows].astype(np.int64)).to(self._model.device)
            tokens = torch.from_numpy(draws.tokens.astype(np.int64)).to(slots.device)
            self._last_tokens.index_copy_(0, slots, self._comm.broadcast(tokens))
            token_ids[rows] = draws.tokens
            bad[rows] |= draws.bad
            logprobs = {int(rows[place]): found for place, found in draws.logprobs.items()}
        return StepResult(token_ids, bad, logprobs, 1e3 * (time.perf_counter() - started - waited), scores)

    def _advance(self) -> None:
        self.progress += 1

    def _guides(self, step: LocalStep, rows: IndexArray) -> Guides | None:
        """Wait for the masks of a step that has guided rows."""
        if not len(step.batch.guided):
            return None
        step.guided.wait()
        if step.masks is None:
            raise RuntimeError("the engine was closed while a step waited for its masks")
        return Guides(np.searchsorted(rows, step.batch.guided), step.masks)


class _Counted:
    """Attention of one step that tells of every layer it comes to."""

    def __init__(self, plan: PlannedAttention, advance: Callable[[], None]) -> None:
        self._plan = plan
        self._advance = advance

    def run(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        self._advance()
        return self._plan.run(layer_id, q, k, v, scale=scale, window=window, softcap=softcap)


def _operate() -> None:
    torch.ones(_LARGE).sum()


class FollowerEngine:
    """What a rank above 0 computes of a step: the same, but for the draw.

    Args:
        model: this rank's piece, with its weights.
        cache: of its heads.
        limits: as of rank 0.
        attention_backend: likewise.
        comm: to the other ranks.
    """

    def __init__(self, model: Model, cache: KVCache, limits: EngineLimits, attention_backend: str, comm: Comm) -> None:
        self._model = model
        self._comm = comm
        self._attention = select_backend(attention_backend, cache, model.dtype, model.device)
        self._last_tokens = torch.zeros(limits.max_running, dtype=torch.int64, device=model.device)

    def compute(self, batch: Batch) -> None:
        """Compute a step, in the order in which rank 0 computes them."""
        inputs = prepare(batch, self._last_tokens, self._model.device)
        plan = self._attention.plan(inputs.attention)
        context = ForwardContext(inputs.positions, plan, inputs.logits_index, num_decode=batch.num_decode)
        hidden = self._model.forward(inputs.input_ids, context)
        rows = inputs.drawn_rows
        first = len(rows)
        for score in batch.scores:
            last = first + len(score.targets)
            score_tokens(self._model.logits, hidden[first:last], score)
            first = last
        if len(rows):
            self._model.logits(hidden[: len(rows)])
            slots = torch.from_numpy(batch.slots[rows].astype(np.int64)).to(self._model.device)
            self._last_tokens.index_copy_(0, slots, self._comm.broadcast(torch.zeros_like(slots)))
