"""The forward pass of a step on a GPU: a graph or the layers run on what `gpu_inputs` has written down.

Three ways: steps of single tokens that all draw are replayed from graphs by their number of rows; others, when they
are not too large, from graphs by their number of tokens; the rest runs eagerly. All three compute alike. Owns the
block and the graphs; knows neither streams nor chance. Of several ranks the first writes a step down, and all launch
it.
"""

from typing import Final

import torch
from torch import Tensor

from services.scheduler.core.batch import Batch, StepPath
from services.scheduler.core.ports import EngineLimits
from services.scheduler.engine.attention.triton import DecodeRows, PrefillRows, TritonAttention
from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.gpu_inputs import MAX_CHUNKS, Places, StepWriter
from services.scheduler.engine.graph import StepGraphs, mixed_sizes
from services.scheduler.engine.kernels.decode_attention import DecodeWorkspace, decode_shape
from services.scheduler.engine.kernels.few_linear import MAX_TOKENS as FEW_TOKENS
from services.scheduler.engine.kernels.prefill_attention import (
    PIECE_WORDS,
    PrefillShape,
    PrefillWorkspace,
)
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.models.llama import LlamaModel
from services.scheduler.engine.parallel.comm import SOLO, Comm
from services.scheduler.engine.parallel.orders import StepPlan
from services.scheduler.engine.staging import StepBlock, StepImage
from services.scheduler.engine.stream import new_stream

_PROGRAMS_PER_SM: Final = 8


class Forward:
    """Computes final states.

    Attributes:
        block: what steps are written to.
        decode_graphs: by number of rows.
        mixed_graphs: by number of tokens.
        path: how the step launched last runs.
    """

    def __init__(
        self, model: LlamaModel, cache: KVCache, limits: EngineLimits, multiprocessors: int, comm: Comm = SOLO
    ) -> None:
        """Reserve the buffers of a step.

        Args:
            model: with its weights.
            cache: the pool.
            limits: what callers may ask for.
            multiprocessors: of the GPU.
            comm: the ranks, which have the same graphs.
        """
        config, device = model.config, model.device
        self._model = model
        self._cache = cache
        self._limits = limits
        self._multiprocessors = multiprocessors
        columns = min(-(-limits.max_seq_len // limits.page_size), limits.num_pages)
        shape = PrefillShape.of(config.num_qo_heads, config.num_kv_heads, multiprocessors)
        self._prefill_workspace = PrefillWorkspace.allocate(shape, config.head_dim, device)
        most = shape.max_pieces(limits.max_step_tokens, max(limits.max_running, MAX_CHUNKS))
        self.block = StepBlock(limits.max_running, columns, limits.max_step_tokens, PIECE_WORDS * most, device)
        self._writer = StepWriter(self.block, limits, shape)
        self._workspace = DecodeWorkspace.allocate(
            limits.max_running, limits.max_seq_len, config.num_qo_heads, config.num_kv_heads, config.head_dim, device,
            max_programs=_PROGRAMS_PER_SM * multiprocessors,
        )  # fmt: skip
        self._side = new_stream(device) if device.type == "cuda" else None
        self.decode_graphs = StepGraphs("decode", self._decode_states, comm)
        self.mixed_graphs = StepGraphs("mixed", self._mixed_states, comm)
        self.path: StepPath = "eager"

    def capture(self, decode_sizes: list[int], *, mixed: bool, show: bool = True) -> None:
        """Capture graphs on the current stream.

        Args:
            decode_sizes: rows of steps of single tokens.
            mixed: whether steps with prompts get graphs too.
            show: whether a bar may tell how far it is.
        """
        self._writer.pad_all().send(whole=True)
        self.decode_graphs.capture(decode_sizes, show=show)
        if mixed:
            self.mixed_graphs.capture(mixed_sizes(self._limits.max_step_tokens), show=show)

    def write(self, image: StepImage, batch: Batch, rows: Places) -> StepPlan:
        """Write a step down, and decide how it is computed.

        Args:
            image: the step, opened; page changes and draws are written down by the caller.
            batch: the step.
            rows: (num_drawn,) rows that draw.
        """
        padded = self.padded_rows(batch, rows)
        if padded is not None:
            self._writer.put_decode(image, batch, padded)
            return StepPlan("decode_graph", padded)
        single = bool((batch.lengths == 1).all())
        num_decode = batch.num_rows if single else int((batch.lengths != 1).argmax())
        num_chunks, num_tokens = batch.num_rows - num_decode, len(batch.input_ids)
        tokens = None if batch.scores or num_chunks > MAX_CHUNKS else self.mixed_graphs.size_for(num_tokens)
        pieces, num_wanted = self._writer.put_mixed(image, batch, rows, num_decode, tokens)
        if tokens is not None:
            return StepPlan("mixed_graph", tokens)
        return StepPlan("eager", num_tokens, num_decode, num_chunks, pieces, num_wanted)

    def launch(self, image: StepImage, plan: StepPlan) -> Tensor:
        """Launch the forward pass of a step that is written down; every rank does so alike.

        Returns:
            Final states of the tokens that draw (and padding), then of those that are scored.
        """
        image.send(whole=plan.is_whole)
        self.path = plan.path
        if plan.path == "decode_graph":
            return self.decode_graphs.replay(plan.size)
        if plan.path == "mixed_graph":
            return self.mixed_graphs.replay(plan.size)
        input_ids = self.block.lay_out("token_", plan.size)
        decode = self._decode_rows(plan.num_decode) if plan.num_decode else None
        prefill = self._prefill_rows(plan.num_chunks, plan.num_pieces) if plan.num_chunks else None
        index = None if plan.num_wanted == plan.size else self.block.view("wanted", plan.num_wanted)
        return self._states(input_ids, "token_", decode, prefill, index)

    def padded_rows(self, batch: Batch, rows: Places) -> int | None:
        """Rows of the graph that a step of single tokens is replayed from, or None."""
        if len(rows) < batch.num_rows or batch.scores or (batch.lengths != 1).any():
            return None
        return self.decode_graphs.size_for(batch.num_rows)

    def compute_padding(self, num_tokens: int) -> Tensor:
        """Compute a step of padding, as large as a step can be: what memory it takes is what a step takes."""
        self._writer.pad_all().send(whole=True)
        index = self.block.view("wanted", self._limits.max_running)
        return self._states(self.block.lay_out("token_", num_tokens), "token_", None, None, index)

    # --- computing it

    def _decode_rows(self, rows: int) -> DecodeRows:
        shape = decode_shape(rows, self._multiprocessors)
        return DecodeRows(self.block.view("slots", rows), self.block.view("seq_lens", rows), shape)

    def _prefill_rows(self, chunks: int, pieces: int) -> PrefillRows:
        names = ("chunk_slots", "chunk_starts", "chunk_lengths", "chunk_offsets")
        slots, starts, lengths, offsets = (self.block.view(name, chunks) for name in names)
        return PrefillRows(slots, starts, lengths, offsets, self._pieces(pieces))

    def _decode_states(self, rows: int) -> Tensor:
        """A step of single tokens, from the front of the block."""
        return self._states(self.block.lay_out("", rows), "", self._decode_rows(rows), None, None)

    def _mixed_states(self, tokens: int) -> Tensor:
        """A step of so many tokens, decode rows first."""
        rows = self._writer.num_states(tokens)
        input_ids = self.block.lay_out("token_", tokens)
        prefill = self._prefill_rows(MAX_CHUNKS + 1, self._writer.most_pieces(tokens))
        return self._states(input_ids, "token_", self._decode_rows(rows), prefill, self.block.view("wanted", rows))

    def _states(
        self,
        input_ids: Tensor,
        prefix: str,
        decode: DecodeRows | None,
        prefill: PrefillRows | None,
        index: Tensor | None,
    ) -> Tensor:
        num_tokens = len(input_ids)
        positions = self.block.view(f"{prefix}positions", num_tokens)
        mapping = self.block.view(f"{prefix}mapping", num_tokens)
        side = self._side if self._side is not None and torch.cuda.is_current_stream_capturing() else None
        attention = TritonAttention(
            self._cache,
            self.block.table,
            self._workspace,
            self._prefill_workspace,
            positions,
            mapping,
            decode,
            prefill,
            side,
        )
        attention.begin()
        few = prefill is None and index is None and num_tokens <= FEW_TOKENS
        with torch.inference_mode():
            context = ForwardContext(positions, attention, index, attention, mapping=mapping, few=few)
            return self._model.forward(input_ids, context)

    def _pieces(self, count: int) -> Tensor:
        return self.block.view("pieces", PIECE_WORDS * count).view(-1, PIECE_WORDS)
