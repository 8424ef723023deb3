"""The engine of one GPU: steps are launched behind each other and the host waits for nothing but drawn tokens.

One stream computes, another carries drawn tokens to the host. Steps whose rows all compute one token and draw
are replayed from graphs; others run eagerly. All calls come from the step loop's thread. Knows slots, pages and
steps; knows neither requests, nor the broker, nor how a batch was chosen.
"""

import logging
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import Batch, MaskArray, PositionLogprobs, StepResult
from services.scheduler.core.ports import EngineFault, EngineLimits, Step
from services.scheduler.engine.attention.triton import DecodeRows, PrefillRows, TritonAttention
from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.graph import DecodeGraph, DecodeGraphs
from services.scheduler.engine.kernels.decode_attention import DecodeWorkspace, decode_shape
from services.scheduler.engine.kernels.prefill_attention import TILE, list_tiles
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.sampler import Guides, score_tokens
from services.scheduler.engine.sampler_device import DeviceSampler, PendingLogprobs
from services.scheduler.engine.staging import NUM_IMAGES, StepBlock, StepImage
from services.scheduler.engine.stream import Mark, Streams

log = logging.getLogger(__name__)

_MAX_PROGRAMS_PER_SM: Final = 4
Places = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class GpuStep:
    """A launched batch.

    Attributes:
        batch: what it runs.
        rows: (num_drawn,) rows that draw.
        hidden: final states of those rows (and padding), then of the tokens that are scored.
        graph: what it was replayed from.
        tokens: (num_drawn,) int32, pinned; filled when `done` has passed.
        logprobs: on their way, likewise.
        marks: events around the forward pass, and `done`.
    """

    batch: Batch
    rows: Places
    hidden: Tensor
    graph: DecodeGraph | None
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
        config, device = model.config, model.device
        self._model = model
        self._cache = cache
        self._limits = limits
        self._streams = streams
        columns = min(-(-limits.max_seq_len // limits.page_size), limits.num_pages)
        self._block = StepBlock(limits.max_running, limits.max_running, columns, limits.max_step_tokens, TILE, device)
        self._sampler = DeviceSampler(limits.max_running, limits.vocab_size, limits.eos_token_ids, self._block)
        self._workspace = DecodeWorkspace.allocate(
            limits.max_running, limits.max_seq_len, config.num_qo_heads, config.num_kv_heads, config.head_dim, device,
            max_programs=_MAX_PROGRAMS_PER_SM * streams.multiprocessors,
        )  # fmt: skip
        self._host_tokens = [streams.pinned(limits.max_running) for _ in range(NUM_IMAGES)]
        self._graphs = DecodeGraphs(self._decode_states, self._draw_plain)
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
            self._graphs = DecodeGraphs(self._decode_states, self._draw_plain)

    def capture(self, sizes: list[int], *, show: bool = True) -> None:
        """Capture the graphs of decode steps of some sizes."""
        with torch.inference_mode(), self._streams.compute():
            self._pad_all().send(whole=False)
            self._graphs.capture(sizes, show=show)

    def compute_padding(self, num_tokens: int) -> None:
        """Compute a step of padding, as large as a step can be: what memory it takes is what a step takes."""
        with torch.inference_mode(), self._streams.compute():
            image = self._pad_all()
            image.fill("token_ids", 0, num_tokens, 0)
            image.fill("token_positions", 0, num_tokens, 0)
            image.fill("token_mapping", 0, num_tokens, -1)
            image.fill("wanted", 0, self._block.max_rows, 0)
            image.send(whole=True)
            index = self._block.view("wanted", self._block.max_rows)
            input_ids = self._block.lay_out("token_", num_tokens)
            self._draw_plain(self._states(input_ids, "token_", None, None, index))

    # --- the forward pass

    def _forward(self, batch: Batch) -> GpuStep:
        rows = np.flatnonzero(batch.sample)
        single = bool((batch.lengths == 1).all())
        plain = single and len(rows) == batch.num_rows and not batch.scores
        graph = self._graphs.find(batch.num_rows) if plain else None
        image = self._block.open()
        changes = image.put_changes(self._block.changes_of(batch))
        while len(changes):  # many pages at once: those go ahead
            image.send(whole=False)
            self._block.lay_out("", 1)
            image = self._block.open()
            changes = image.put_changes(changes)
        padded = graph.rows if graph is not None else len(rows)
        self._sampler.describe(image, batch.slots[rows], batch.out_index[rows], padded)
        start = self._streams.mark()
        if graph is not None:
            self._put_decode(image, batch, padded)
            image.send(whole=False)
            graph.forward.replay()
            hidden = graph.hidden
        else:
            hidden = self._eager(image, batch, rows)
        return GpuStep(batch, rows, hidden, graph, [start, self._streams.mark()])

    def _put_decode(self, image: StepImage, batch: Batch, padded: int) -> None:
        """Write down a step of single tokens, and padding behind it."""
        num, pad = batch.num_rows, padded - batch.num_rows
        starts, size = batch.starts, self._limits.page_size
        image.put("slots", batch.slots)
        image.fill("slots", num, padded, self._block.padding_slot)
        image.put("seq_lens", starts + 1, pad)
        image.put("ids", batch.input_ids, pad)
        image.put("positions", starts, pad)
        image.put("mapping", batch.page_table[np.arange(num), starts // size] * size + starts % size)
        image.fill("mapping", num, padded, -1)

    def _eager(self, image: StepImage, batch: Batch, rows: Places) -> Tensor:
        """Run a step of any rows; returns the final states of the tokens that are wanted."""
        block, size = self._block, self._limits.page_size
        starts, lengths = batch.starts.astype(np.int64), batch.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        offsets, num_tokens = ends - lengths, int(ends[-1])
        token_rows = np.repeat(np.arange(batch.num_rows), lengths)
        positions = np.arange(num_tokens) - (offsets - starts)[token_rows]
        num_decode = batch.num_rows if (lengths == 1).all() else int((lengths != 1).argmax())
        tiles = list_tiles(starts[num_decode:], lengths[num_decode:])
        tiles[:, 0] += num_decode
        wanted = np.concatenate(
            (ends[rows] - 1, *(offsets[score.row] + np.arange(len(score.targets)) for score in batch.scores))
        )
        image.put("slots", batch.slots)
        image.put("seq_lens", ends - offsets + starts)
        image.put("starts", starts)
        image.put("lengths", lengths)
        image.put("offsets", offsets)
        image.put("token_ids", batch.input_ids)
        image.put("token_slots", batch.slots[token_rows])
        image.put("token_positions", positions)
        image.put("token_mapping", batch.page_table[token_rows, positions // size] * size + positions % size)
        image.put("wanted", wanted)
        image.put("tiles", tiles)
        image.send(whole=True)
        input_ids = block.lay_out("token_", num_tokens)
        decode, prefill = None, None
        slots = block.view("slots", batch.num_rows)
        if num_decode:
            shape = decode_shape(num_decode, self._streams.multiprocessors)
            decode = DecodeRows(slots[:num_decode], block.view("seq_lens", num_decode), shape)
        if len(tiles):
            starts_, lengths_, offsets_ = (
                block.view(name, batch.num_rows) for name in ("starts", "lengths", "offsets")
            )
            prefill = PrefillRows(slots, starts_, lengths_, offsets_, block.view("tiles", tiles.size).view(-1, 2))
        index = None if len(wanted) == num_tokens else block.view("wanted", len(wanted))
        return self._states(input_ids, "token_", decode, prefill, index)

    def _decode_states(self, rows: int) -> Tensor:
        """The forward pass of a decode step, from the front of the block; may be captured."""
        block = self._block
        input_ids = block.lay_out("", rows)
        shape = decode_shape(rows, self._streams.multiprocessors)
        decode = DecodeRows(block.view("slots", rows), block.view("seq_lens", rows), shape)
        return self._states(input_ids, "", decode, None, None)

    def _states(
        self,
        input_ids: Tensor,
        prefix: str,
        decode: DecodeRows | None,
        prefill: PrefillRows | None,
        index: Tensor | None,
    ) -> Tensor:
        num_tokens = len(input_ids)
        positions = self._block.view(f"{prefix}positions", num_tokens)
        mapping = self._block.view(f"{prefix}mapping", num_tokens)
        attention = TritonAttention(
            self._cache, self._block.table, self._workspace, positions, mapping, decode, prefill
        )
        attention.begin()
        return self._model.forward(input_ids, ForwardContext(positions, attention, index, attention))

    def _pad_all(self) -> StepImage:
        """Write down a step of padding alone, that can be computed with."""
        image, rows = self._block.open(), self._block.max_rows
        nobody = np.zeros(0, np.int32)
        image.put("num_changes", np.zeros(1, np.int32))
        self._sampler.describe(image, nobody, nobody, rows)
        image.fill("slots", 0, rows, self._block.padding_slot)
        image.fill("mapping", 0, rows, -1)
        for name in ("seq_lens", "ids", "positions"):
            image.fill(name, 0, rows, 0)
        return image

    # --- the draw

    def _draw_plain(self, hidden: Tensor) -> None:
        self._sampler.draw_plain(self._model.logits(hidden))

    def _draw(self, step: GpuStep, guides: Guides | None) -> None:
        """Draw behind the forward pass, and start the tokens on their way to the host."""
        num, batch = len(step.rows), step.batch
        self._streams.after_copy()
        if num:
            slots = batch.slots[step.rows]
            if guides is None and self._sampler.is_plain(slots):
                if step.graph is not None:
                    step.graph.draw.replay()
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
        return StepResult(token_ids, bad, logprobs, forward_ms, self._scores(step, bad))

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
