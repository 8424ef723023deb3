"""The `triton` attention backend of a GPU: our own kernels over pages, with nothing planned on the host.

Rows of one token lead a step and go through the decode kernel; the others are prompt chunks and go through the
prefill kernel. One object holds the views of a step, so a captured graph can run it again with other numbers.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from services.scheduler.engine.kernels.decode_attention import (
    DecodeShape,
    DecodeWorkspace,
    decode_attention,
    plan_decode,
)
from services.scheduler.engine.kernels.elementwise import store_kv
from services.scheduler.engine.kernels.prefill_attention import PrefillWorkspace, prefill_attention
from services.scheduler.engine.kernels.qkv import qkv_norm_rope_store
from services.scheduler.engine.kvcache import KVCache


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The leading rows of a step, of one token each.

    Attributes:
        slots: (rows,) int32, device; their lines of the page table.
        seq_lens: (rows,) int32, device; 0 for padding.
        shape: how the kernel is cut.
    """

    slots: Tensor
    seq_lens: Tensor
    shape: DecodeShape


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prompt chunks of a step, all int32 on the device.

    Attributes:
        slots: (rows,) their lines of the page table.
        starts: (rows,) tokens before the chunk.
        lengths: (rows,) tokens of the chunk.
        offsets: (rows,) first token of the chunk in the step.
        pieces: (num_pieces, PIECE_WORDS) from `list_pieces`.
    """

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    offsets: Tensor
    pieces: Tensor


class TritonAttention:
    """Attention of one step; made anew for each, or once per captured graph."""

    def __init__(
        self,
        cache: KVCache,
        table: Tensor,
        workspace: DecodeWorkspace,
        prefill_workspace: PrefillWorkspace,
        positions: Tensor,
        mapping: Tensor,
        decode: DecodeRows | None,
        prefill: PrefillRows | None,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        """Take the views of a step.

        Args:
            cache: the pool.
            table: (slots, columns) int32, device; the page table.
            workspace: of the decode kernel.
            prefill_workspace: of the prefill kernel.
            positions: (num_tokens,) int32, device; place of each token in its request.
            mapping: (num_tokens,) int32, device; where its keys and values go, or -1.
            decode: the leading rows of one token.
            prefill: the others.
            side: a stream to compute the prompts on, beside the decode rows; only within a graph, where nothing is
                freed in between.
        """
        self._cache = cache
        self._table = table
        self._workspace = workspace
        self._prefill_workspace = prefill_workspace
        self._positions = positions
        self._mapping = mapping
        self._decode = decode
        self._prefill = prefill
        self._side = side

    def begin(self) -> None:
        """Divide the work of the decode rows, on the device; once per step, before the layers."""
        if self._decode is not None:
            plan_decode(
                self._workspace, self._decode.seq_lens, self._decode.slots, self._cache.num_kv_heads, self._decode.shape
            )

    def run_fused(
        self,
        layer_id: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        angles: Tensor,
        *,
        num_qo_heads: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Normalise, rotate, store and attend; see `context.FusedAttention`."""
        keys, values = self._cache.keys[layer_id], self._cache.values[layer_id]
        q_norm, k_norm, eps = norms if norms is not None else (None, None, 0.0)
        qkv_norm_rope_store(
            qkv, q_norm, k_norm, angles, self._positions, self._mapping, keys, values, num_qo_heads, eps
        )
        q = qkv.view(qkv.shape[0], -1, self._cache.head_dim)[:, :num_qo_heads]
        return self._attend(layer_id, q, scale, window)

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
        """Store, then attend; see `context.PlannedAttention`."""
        assert softcap is None, "a model with capped scores runs on the torch backend"
        store_kv(k, v, self._mapping, self._cache.keys[layer_id], self._cache.values[layer_id])
        return self._attend(layer_id, q, scale, window)

    def _attend(self, layer_id: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self._cache.keys[layer_id], self._cache.values[layer_id]
        num_tokens, heads, dim = q.shape
        out = torch.empty((num_tokens, heads, dim), dtype=q.dtype, device=q.device)
        decode, prefill = self._decode, self._prefill
        beside = prefill is not None and decode is not None and self._side is not None
        if beside:
            # Prompts want the device's products, decode rows its memory: they run beside each other.
            assert self._side is not None
            self._side.wait_stream(torch.cuda.current_stream())
        if prefill is not None:
            with torch.cuda.stream(self._side) if beside else nullcontext():
                prefill_attention(
                    self._prefill_workspace, q, keys, values, self._table, prefill.slots, prefill.starts,
                    prefill.lengths, prefill.offsets, prefill.pieces, out, scale, window,
                )  # fmt: skip
        if decode is not None:
            decode_attention(
                self._workspace, decode.shape, q, keys, values, self._table, decode.seq_lens, out, scale,
                window,
            )  # fmt: skip
        if beside:
            assert self._side is not None
            torch.cuda.current_stream().wait_stream(self._side)
        return out.view(num_tokens, heads * dim)
