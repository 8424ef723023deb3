"""The engine of one GPU: steps are launched behind each other and the host waits for nothing but drawn tokens.

One stream computes, another carries drawn tokens to the host. All calls come from the step loop's thread. Knows
slots, pages and steps; knows neither requests, nor the broker, nor how a batch was chosen.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import Batch, MaskArray, PositionLogprobs, StepPath, StepResult
from services.scheduler.core.ports import EngineFault, EngineLimits, Step
from services.scheduler.engine.gpu_forward import Forward
from services.scheduler.engine.graph import StepGraphs
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.sampler import Guides, score_tokens
from services.scheduler.engine.sampler_device import DeviceSampler, PendingLogprobs
from services.scheduler.engine.staging import NUM_IMAGES
from services.scheduler.engine.stream import Mark, Streams

Places = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class GpuStep:
    """A launched batch.

    Attributes:
        batch: what it runs.
        rows: (num_drawn,) rows that draw.
        hidden: final states of those rows (and padding), then of the tokens that are scored.
        replayed: rows of the graph of single tokens that it was replayed from.
        path: how its forward pass runs.
        tokens: (num_drawn,) int32, pinned; filled when `done` has passed.
        logprobs: on their way, likewise.
        marks: events around the forward pass, and `done`.
    """

    batch: Batch
    rows: Places
    hidden: Tensor
    replayed: int | None
    path: StepPath
    marks: list[Mark] = field(default_factory=list)
    tokens: Tensor | None = None
    logprobs: PendingLogprobs | None = None


class GpuEngine:
    """An Engine on one GPU; see the module."""

    def __init__(self, model: LlamaModel, cache: KVCache, limits: EngineLimits, streams: Streams) -> None:
        """Take over what was loaded and reserve the buffers of a step.

        Args:
            model: with its weights.
            cache: the pool; nobody else writes to it.
            limits: what callers may ask for.
            streams: where things run.
        """
        self._model = model
        self._limits = limits
        self._streams = streams
        self._run = Forward(model, cache, limits, streams.multiprocessors)
        self._sampler = DeviceSampler(limits.max_running, limits.vocab_size, limits.eos_token_ids, self._run.block)
        self._host_tokens = [streams.pinned(limits.max_running) for _ in range(NUM_IMAGES)]
        self._draws = StepGraphs("draw", self._draw_states)
        self._num_launched = 0
        self._undrawn: GpuStep | None = None
        self._fault: BaseException | None = None

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        return self._limits

    def launch(self, batch: Batch) -> Step:
        """Start a step behind those already launched and return at once.

        Raises:
            EngineFault: the device is lost, or the engine is closed.
        """
        assert self._undrawn is None, "a step was launched before the one before it was guided"
        self._check()
        try:
            with torch.inference_mode(), self._streams.compute():
                for setup in batch.setups:
                    self._sampler.set_up(setup)
                step = self._forward(batch)
                if len(batch.guided):
                    self._undrawn = step
                else:
                    self._draw(step, None)
                return step
        except RuntimeError as e:
            raise self._lost(e) from e

    def guide(self, step: Step, masks: MaskArray) -> None:
        """Say what the guided rows of a launched step may draw; returns at once."""
        assert isinstance(step, GpuStep) and step is self._undrawn and len(masks) == len(step.batch.guided)
        self._undrawn = None
        self._check()
        try:
            with torch.inference_mode(), self._streams.compute():
                self._draw(step, Guides(np.searchsorted(step.rows, step.batch.guided), masks))
        except RuntimeError as e:
            raise self._lost(e) from e

    def wait(self, step: Step) -> StepResult:
        """Block, without holding the interpreter, until the step has retired.

        Raises:
            EngineFault: this step or one before it failed, or the engine is closed.
        """
        assert isinstance(step, GpuStep)
        self._check()
        try:
            start, end, done = step.marks
            done.synchronize()
            with torch.inference_mode(), self._streams.compute():
                return self._read(step, start.elapsed_time(end))
        except RuntimeError as e:
            raise self._lost(e) from e

    def check(self) -> None:
        """See whether the engine can go on.

        Raises:
            EngineFault: the device is lost, or the engine is closed.
        """
        self._check()

    def close(self) -> None:
        """Let the device finish and free it. Safe to call twice, and from another thread than the others."""
        if self._fault is None:
            self._fault = RuntimeError("the engine is closed")
            self._streams.finish()
            for graphs in (self._draws, self._run.decode_graphs, self._run.mixed_graphs):
                graphs.drop()

    def capture(self, sizes: list[int], *, mixed: bool, show: bool = True) -> None:
        """Capture the graphs of decode steps of some sizes, and of steps with prompts."""
        with torch.inference_mode(), self._streams.compute():
            self._run.capture(sizes, mixed=mixed, show=show)
            self._draws.capture(self._run.decode_graphs.sizes, show=show)

    def compute_padding(self, num_tokens: int) -> None:
        """Compute a step of padding, as large as a step can be: what memory it takes is what a step takes."""
        with torch.inference_mode(), self._streams.compute():
            self._draw_plain(self._run.compute_padding(num_tokens))

    # --- the forward pass

    def _forward(self, batch: Batch) -> GpuStep:
        rows = np.flatnonzero(batch.sample)
        block = self._run.block
        image = block.open()
        changes = image.put_changes(block.changes_of(batch))
        while len(changes):  # many pages at once: those go ahead
            image.send(whole=False)
            block.lay_out("", 1)
            image = block.open()
            changes = image.put_changes(changes)
        padded = self._run.padded_rows(batch, rows) or len(rows)
        self._sampler.describe(image, batch.slots[rows], batch.out_index[rows], padded)
        start = self._streams.mark()
        hidden, replayed = self._run.run(image, batch, rows)
        return GpuStep(batch, rows, hidden, replayed, self._run.path, [start, self._streams.mark()])

    # --- the draw

    def _draw_plain(self, hidden: Tensor) -> None:
        self._sampler.draw_plain(self._model.logits(hidden))

    def _draw_states(self, rows: int) -> Tensor:
        """Draw from what the graph of so many rows leaves; may be captured."""
        self._draw_plain(self._run.decode_graphs.result(rows))
        return self._sampler.tokens

    def _draw(self, step: GpuStep, guides: Guides | None) -> None:
        """Draw behind the forward pass, and start the tokens on their way to the host."""
        num, batch = len(step.rows), step.batch
        self._streams.after_copy()
        if num:
            slots = batch.slots[step.rows]
            if guides is None and self._sampler.is_plain(slots):
                if step.replayed is not None and self._draws.size_for(step.replayed) == step.replayed:
                    self._draws.replay(step.replayed)
                else:
                    self._draw_plain(step.hidden[:num])
            else:
                logits = self._model.logits(step.hidden[:num])
                step.logprobs = self._sampler.draw(logits, slots, batch.out_index[step.rows], guides)
        if guides is None:
            step.marks[1] = self._streams.mark()
        step.tokens = self._host_tokens[self._num_launched % NUM_IMAGES][:num]
        self._num_launched += 1
        with self._streams.copying():
            step.tokens.copy_(self._sampler.tokens[:num], non_blocking=True)
            if step.logprobs is not None:
                step.logprobs = step.logprobs.to_host()
            step.marks.append(self._streams.mark())

    def _read(self, step: GpuStep, forward_ms: float) -> StepResult:
        batch, rows = step.batch, step.rows
        token_ids = np.full(batch.num_rows, -1, dtype=np.int32)
        bad = np.zeros(batch.num_rows, dtype=np.bool_)
        assert step.tokens is not None
        drawn = step.tokens.numpy()
        bad[rows] = drawn < 0
        token_ids[rows] = np.maximum(drawn, 0)
        logprobs = {}
        if step.logprobs is not None:
            logprobs = {int(rows[i]): found for i, found in step.logprobs.read().items() if drawn[i] >= 0}
        return StepResult(token_ids, bad, logprobs, forward_ms, self._scores(step, bad), step.path)

    def _scores(self, step: GpuStep, bad: npt.NDArray[np.bool_]) -> dict[int, PositionLogprobs]:
        scores, first = {}, len(step.rows)
        for score in step.batch.scores:
            last = first + len(score.targets)
            scores[score.row], broken = score_tokens(self._model.logits, step.hidden[first:last], score)
            bad[score.row] |= broken
            first = last
        return scores

    def _check(self) -> None:
        if self._fault is not None:
            raise EngineFault(f"the engine cannot go on: {self._fault!r}") from self._fault

    def _lost(self, error: RuntimeError) -> EngineFault:
        """Note that the device's state is not known any more."""
        self._fault = self._fault or error
        return EngineFault(f"a step failed: {error!r}")
