"""The engine of GPUs: steps are launched behind each other and the host waits for nothing but drawn tokens.

One stream computes, another carries drawn tokens to the host. Of several GPUs this is rank 0, which tells the others
what it launches. All calls come from the step loop's thread. Knows slots, pages and steps; knows neither requests,
nor the broker, nor how a batch was chosen.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import Batch, IntArray, MaskArray, PositionLogprobs, StepPath, StepResult
from services.scheduler.core.ports import EngineFault, EngineLimits, Step
from services.scheduler.engine.gpu_rank import GpuRank
from services.scheduler.engine.parallel.comm import Comm
from services.scheduler.engine.parallel.ending import EXIT_FAULT, end_process, leave_device
from services.scheduler.engine.parallel.group import Followers, RankLost
from services.scheduler.engine.parallel.orders import DrawMode, DrawOrder, PagesOrder, ScoreOrder, StepOrder
from services.scheduler.engine.sampler import Guides, score_tokens
from services.scheduler.engine.sampler_device import PendingLogprobs
from services.scheduler.engine.staging import NUM_IMAGES
from services.scheduler.engine.stream import Mark

log = logging.getLogger(__name__)

_LOOK_S: Final = 2e-5
"""Between two looks whether a step has retired, where a lost rank may mean that it never will."""
_LEAVE_S: Final = 2.0
"""How long a call may go on when a rank is lost; by then the device is waiting for it in vain."""

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
    """An Engine on GPUs; see the module."""

    def __init__(self, rank: GpuRank, followers: Followers | None = None) -> None:
        """Take over a GPU.

        Args:
            rank: what it does.
            followers: the other ranks of the model; they end with the engine. `lose` is for them to call.
        """
        self._rank = rank
        self._followers = followers
        self._run = rank.forward
        self._sampler = rank.sampler
        self._streams = rank.streams
        self._host_tokens = [self._streams.pinned(rank.limits.max_running) for _ in range(NUM_IMAGES)]
        self._num_launched = 0
        self._undrawn: GpuStep | None = None
        self._fault: BaseException | None = None
        self._is_busy = self._is_closed = False

    @property
    def limits(self) -> EngineLimits:
        """What it can hold."""
        return self._rank.limits

    @property
    def comm(self) -> Comm:
        """The other ranks."""
        return self._rank.comm

    def launch(self, batch: Batch) -> Step:
        """Start a step behind those already launched and return at once.

        Raises:
            EngineFault: the device is lost, or the engine is closed.
        """
        assert self._undrawn is None, "a step was launched before the one before it was guided"
        with self._working(), self._streams.compute():
            for setup in batch.setups:
                self._sampler.set_up(setup)
            step, mode = self._forward(batch)
            if len(batch.guided):
                self._undrawn = step
            else:
                self._draw(step, mode, None)
            return step

    def guide(self, step: Step, masks: MaskArray) -> None:
        """Say what the guided rows of a launched step may draw; returns at once."""
        assert isinstance(step, GpuStep) and step is self._undrawn and len(masks) == len(step.batch.guided)
        self._undrawn = None
        with self._working(), self._streams.compute():
            if self._followers is not None:
                self._followers.order(DrawOrder(len(step.rows), "told"))
            self._draw(step, "told", Guides(np.searchsorted(step.rows, step.batch.guided), masks))

    def wait(self, step: Step) -> StepResult:
        """Block, without holding the interpreter, until the step has retired.

        Raises:
            EngineFault: this step or one before it failed, or the engine is closed.
        """
        assert isinstance(step, GpuStep)
        with self._working():
            start, end, done = step.marks
            self._pass(done)
            with self._streams.compute():
                return self._read(step, start.elapsed_time(end))

    def check(self) -> None:
        """See whether the engine can go on.

        Raises:
            EngineFault: the device is lost, or the engine is closed.
        """
        self._check()

    def close(self) -> None:
        """Let the device finish and free it. Safe to call twice, and from another thread than the others."""
        if self._is_closed:
            return
        self._is_closed, lost = True, self._fault is not None
        self._fault = self._fault or RuntimeError("the engine is closed")
        if lost and self._followers is not None:
            self._leave_device()
            self._followers.close()
        elif not lost:
            self._is_busy = True
            self._rank.close()
            self._is_busy = False
            if self._followers is not None:
                self._followers.close()
                self._rank.comm.close()

    # --- the forward pass

    def _forward(self, batch: Batch) -> tuple[GpuStep, DrawMode]:
        rows = np.flatnonzero(batch.sample)
        block, followers = self._run.block, self._followers
        image = block.open()
        changes = image.put_changes(block.changes_of(batch))
        while len(changes):  # many pages at once: those go ahead
            if followers is not None:
                followers.order(PagesOrder(image.to_bytes(whole=False)))
            image.send(whole=False)
            block.lay_out("", 1)
            image = block.open()
            changes = image.put_changes(changes)
        slots = batch.slots[rows]
        padded = self._run.padded_rows(batch, rows) or len(rows)
        self._sampler.describe(image, slots, batch.out_index[rows], padded)
        plan, mode = self._run.write(image, batch, rows), self._mode(slots)
        if followers is not None:
            now: DrawMode = mode if len(rows) and not len(batch.guided) else "none"
            scored = [len(score.targets) for score in batch.scores]
            followers.order(StepOrder(plan, image.to_bytes(whole=plan.is_whole), len(rows), now, scored))
        start = self._streams.mark()
        hidden = self._run.launch(image, plan)
        replayed = plan.size if plan.path == "decode_graph" else None
        return GpuStep(batch, rows, hidden, replayed, plan.path, [start, self._streams.mark()]), mode

    # --- the draw

    def _mode(self, slots: IntArray) -> DrawMode:
        """How rows draw that are not guided."""
        if not self._sampler.is_plain(slots):
            return "told"
        return "whole" if self._followers is None or self._sampler.is_filtered(slots) else "pieces"

    def _draw(self, step: GpuStep, mode: DrawMode, guides: Guides | None) -> None:
        """Draw behind the forward pass, and start the tokens on their way to the host."""
        num, batch = len(step.rows), step.batch
        self._streams.after_copy()
        if num and mode == "told":
            logits = self._rank.model.logits(step.hidden[:num])
            slots, out_index = batch.slots[step.rows], batch.out_index[step.rows]
            step.logprobs = self._sampler.draw(logits, slots, out_index, guides)
            self._rank.comm.broadcast(self._sampler.tokens[:num])
        elif num:
            self._rank.draw(mode, step.hidden, num, step.replayed)
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
        if step.batch.scores and self._followers is not None:
            self._followers.order(ScoreOrder())
        for score in step.batch.scores:
            last = first + len(score.targets)
            scores[score.row], broken = score_tokens(self._rank.model.logits, step.hidden[first:last], score)
            bad[score.row] |= broken
            first = last
        return scores

    # --- faults

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Do something with the device that may fail.

        Raises:
            EngineFault: it did, or something did before.
        """
        self._check()
        self._is_busy = True
        try:
            with torch.inference_mode():
                yield
        except EngineFault:
            raise
        except Exception as e:  # a compiler's as well as the device's: the step may be half launched
            # The device's state is not known any more.
            self._fault = self._fault or e
            raise EngineFault(f"a step failed: {e!r}") from e
        finally:
            self._is_busy = False

    def _check(self) -> None:
        if self._fault is not None:
            raise EngineFault(f"the engine cannot go on: {self._fault}") from self._fault

    def _pass(self, done: Mark) -> None:
        """Wait until the device has come to a mark, and no longer than all ranks are there."""
        if self._followers is None:
            done.synchronize()
            return
        while not done.query():
            self._check()
            time.sleep(_LOOK_S)

    def _leave_device(self) -> bool:
        """See that the process, when it ends, does not wait for the device; returns whether there is one."""
        on_gpu = self._rank.model.device.type == "cuda"
        if on_gpu:
            leave_device(EXIT_FAULT, self._rank)
        return on_gpu

    def lose(self, lost: RankLost) -> None:
        """A rank has ended: what was launched may never retire, and whoever asks the device waits for ever.

        So the process ends without asking it: by itself, or here when it is caught in a call. Any thread.
        """
        self._fault = self._fault or lost
        if not self._leave_device():
            return
        until = time.monotonic() + _LEAVE_S
        while self._is_busy and time.monotonic() < until:
            time.sleep(0.01)
        if self._is_busy:
            log.critical("the engine is caught in a call that waits for a lost rank; the process ends")
            end_process(EXIT_FAULT)
