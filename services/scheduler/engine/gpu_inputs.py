"""The inputs of a step on a GPU: what a batch says, and padding where a graph wants more, written into the block.

Beside the page changes and the draws, which their owners write. Knows neither model nor graph; `inputs` is the same
for engines without a block.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch import Batch
from services.scheduler.core.ports import EngineLimits
from services.scheduler.engine.kernels.prefill_attention import PIECE_WORDS, PrefillShape, list_pieces
from services.scheduler.engine.staging import StepBlock, StepImage

MAX_CHUNKS: Final = 16
"""Prompt chunks of a step that is replayed; the place behind them stays empty, and padding pieces belong to it."""
_NO_PIECE: Final = np.array([MAX_CHUNKS, *[0] * (PIECE_WORDS - 1)], np.int32)
Places = npt.NDArray[np.int64]


class StepWriter:
    """Writes steps down."""

    def __init__(self, block: StepBlock, limits: EngineLimits, shape: PrefillShape) -> None:
        """Write into a block.

        Args:
            block: which the caller owns.
            limits: what callers may ask for.
            shape: how the prefill kernel cuts the work of chunks.
        """
        self._block = block
        self._limits = limits
        self._shape = shape

    def num_states(self, tokens: int) -> int:
        """Final states, and decode rows, that a replayed step of so many tokens has room for."""
        return min(tokens, self._limits.max_running)

    def most_pieces(self, tokens: int) -> int:
        """Pieces of so many prompt tokens in as many chunks as a replayed step can have."""
        return self._shape.max_pieces(tokens, MAX_CHUNKS)

    def pad_all(self) -> StepImage:
        """Write down a step of padding alone, that can be computed with."""
        image, rows, tokens = self._block.open(), self._limits.max_running, self._limits.max_step_tokens
        image.fill("num_changes", 0, 1, 0)
        for name in ("seq_lens", "ids", "positions", "temperatures", "top_k", "min_p", "seeds"):
            image.fill(name, 0, rows, 0)
        for name in ("slots", "draw_slots"):
            image.fill(name, 0, rows, self._block.padding_slot)
        image.fill("top_p", 0, rows, 1)
        image.fill("mapping", 0, rows, -1)
        self._pad_mixed(image, 0, 0, 0, 0, tokens)
        return image

    def put_decode(self, image: StepImage, batch: Batch, padded: int) -> None:
        """Write down a step of single tokens that all draw, with padding up to so many rows."""
        num, pad = batch.num_rows, padded - batch.num_rows
        starts, size = batch.starts, self._limits.page_size
        image.put("slots", batch.slots)
        image.fill("slots", num, padded, self._block.padding_slot)
        image.put("seq_lens", starts + 1, pad)
        image.put("ids", batch.input_ids, pad)
        image.put("positions", starts, pad)
        image.put("mapping", batch.page_table[np.arange(num), starts // size] * size + starts % size)
        image.fill("mapping", num, padded, -1)

    def put_mixed(
        self, image: StepImage, batch: Batch, rows: Places, num_decode: int, padded: int | None
    ) -> tuple[int, int]:
        """Write down a step of any rows.

        Args:
            image: the step, opened.
            batch: the step.
            rows: (num_drawn,) rows that draw.
            num_decode: leading rows of one token.
            padded: tokens to pad it to, or None.

        Returns:
            Pieces of its chunks' work, and final states that it leaves.
        """
        size = self._limits.page_size
        starts, lengths = batch.starts.astype(np.int64), batch.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        offsets, num_tokens = ends - lengths, int(ends[-1])
        token_rows = np.repeat(np.arange(batch.num_rows), lengths)
        positions = np.arange(num_tokens) - (offsets - starts)[token_rows]
        chunks = slice(num_decode, batch.num_rows)
        pieces = list_pieces(starts[chunks], lengths[chunks], self._shape)
        scored = [offsets[score.row] + np.arange(len(score.targets)) for score in batch.scores]
        wanted = np.concatenate((ends[rows] - 1, *scored))
        image.put("slots", batch.slots[:num_decode])
        image.put("seq_lens", starts[:num_decode] + 1)
        image.put("chunk_slots", batch.slots[chunks])
        image.put("chunk_starts", starts[chunks])
        image.put("chunk_lengths", lengths[chunks])
        image.put("chunk_offsets", offsets[chunks])
        image.put("pieces", pieces)
        image.put("token_ids", batch.input_ids)
        image.put("token_slots", batch.slots[token_rows])
        image.put("token_positions", positions)
        image.put("token_mapping", batch.page_table[token_rows, positions // size] * size + positions % size)
        image.put("wanted", wanted)
        if padded is not None:
            self._pad_mixed(image, num_decode, len(lengths) - num_decode, len(pieces), num_tokens, padded)
            image.fill("wanted", len(wanted), self.num_states(padded), 0)
        return len(pieces), len(wanted)

    def _pad_mixed(
        self, image: StepImage, num_decode: int, num_chunks: int, num_pieces: int, num_tokens: int, padded: int
    ) -> None:
        """Write padding behind what is there, up to so many tokens."""
        rows = self.num_states(padded)
        image.fill("slots", num_decode, rows, self._block.padding_slot)
        image.fill("seq_lens", num_decode, rows, 0)
        image.fill("chunk_slots", num_chunks, MAX_CHUNKS + 1, self._block.padding_slot)
        for name in ("chunk_starts", "chunk_lengths", "chunk_offsets"):
            image.fill(name, num_chunks, MAX_CHUNKS + 1, 0)
        image.fill_lines("pieces", num_pieces, self.most_pieces(padded), _NO_PIECE)
        for name in ("token_ids", "token_positions"):
            image.fill(name, num_tokens, padded, 0)
        image.fill("token_mapping", num_tokens, padded, -1)
        if not num_tokens:
            image.fill("wanted", 0, rows, 0)
