"""Causal attention of prompt chunks over paged keys and values, as one Triton kernel.

A tile is a run of query rows of one key head: the query heads that share it, token after token. A program takes one
key head and one piece: a tile, and a run of the keys that the tile may see. The host lists the pieces, longest first,
because it knows the lengths anyway; it cuts what few tiles see deep into a prompt into several pieces, so that a small
chunk keeps the whole device busy, and whoever ends last puts the parts together. Keys of the prompt's own chunk are
read from the pages too: they were stored before.

Source: FlashAttention-2 (Dao, 2023), as in Triton's tutorial; the split along the keys follows Flash-Decoding (Dao et
al., 2023); the paging and the packing of heads are our own.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels.decode_attention import LOG2_E

TILE: Final = 128
"""Query rows of one tile: tokens times the query heads of a key head."""
MIN_PIECE: Final = 1024
"""Keys that are worth a program of their own."""
PIECE_WORDS: Final = 8
_BLOCK: Final = 64
_ROUNDS: Final = 2
"""Programs per multiprocessor that are aimed at."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How the work of a device is cut.

    Attributes:
        group: query heads per key head.
        num_kv: key heads.
        programs: that are aimed at.
    """

    group: int
    num_kv: int
    programs: int

    @classmethod
    def of(cls, num_qo_heads: int, num_kv_heads: int, multiprocessors: int) -> "PrefillShape":
        """The cut for a model on a device."""
        return cls(num_qo_heads // num_kv_heads, num_kv_heads, _ROUNDS * multiprocessors)

    @property
    def max_split(self) -> int:
        """Pieces more than tiles, at most."""
        return self.programs // self.num_kv

    def max_pieces(self, tokens: int, rows: int) -> int:
        """Pieces of so many tokens in so many rows, at most."""
        return tokens * self.group // TILE + rows + self.max_split


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Buffers for what is put together in the end; one set serves all layers of a device.

    Attributes:
        partial: (parts, num_kv, TILE, head_dim), float32, device: outputs that are not divided yet.
        lse: (parts, num_kv, TILE, 2), float32, device: maximum and sum of each.
        arrivals: (parts, num_kv), int32, device: parts done, at a tile's first; zero between launches.
    """

    partial: torch.Tensor
    lse: torch.Tensor
    arrivals: torch.Tensor

    @staticmethod
    def allocate(shape: PrefillShape, head_dim: int, device: torch.device) -> "PrefillWorkspace":
        """Allocate for the worst that `list_pieces` can list."""
        parts = max(1, 2 * shape.max_split)
        return PrefillWorkspace(
            torch.zeros((parts, shape.num_kv, TILE, head_dim), dtype=torch.float32, device=device),
            torch.zeros((parts, shape.num_kv, TILE, 2), dtype=torch.float32, device=device),
            torch.zeros((parts, shape.num_kv), dtype=torch.int32, device=device),
        )


def list_pieces(
    starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], shape: PrefillShape
) -> npt.NDArray[np.int32]:
    """List the pieces of some rows, the longest first.

    Args:
        starts: (rows,) tokens of each row before its chunk.
        lengths: (rows,) tokens of the chunk.
        shape: how to cut.

    Returns:
        (num_pieces, PIECE_WORDS) row, tile within the row, first key, end, place of the tile's first part, number of
        its parts, which of them this is, and nothing.
    """
    packed = lengths * shape.group
    counts = -(-packed // TILE)
    rows = np.repeat(np.arange(len(lengths)), counts)
    tiles = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    ends = starts[rows] + (np.minimum((tiles + 1) * TILE, packed[rows]) - 1) // shape.group + 1
    share = -(-int(ends.sum()) * shape.num_kv // max(1, shape.programs))
    limit = max(MIN_PIECE, -(-share // _BLOCK) * _BLOCK)
    sizes = -(-ends // -(-ends // limit))
    sizes = -(-sizes // _BLOCK) * _BLOCK
    parts = -(-ends // sizes)
    tile = np.repeat(np.arange(len(rows)), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    split = np.where(parts > 1, parts, 0)
    pieces = np.zeros((len(tile), PIECE_WORDS), np.int32)
    begins = part * sizes[tile]
    stops = np.minimum(begins + sizes[tile], ends[tile])
    for column, values in enumerate(
        (rows[tile], tiles[tile], begins, stops, (np.cumsum(split) - split)[tile], parts[tile], part)
    ):
        pieces[:, column] = values
    return pieces[np.argsort(begins - stops, kind="stable")]


@triton.jit
def _fold(score, v, top, mass, acc):
    """Take a block of keys and values in."""
    new_top = tl.maximum(top, tl.max(score, 1))
    # A token that sees nothing yet has no maximum; subtracting 0 keeps its weights at 0.
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    weight = tl.exp2(score - safe[:, None])
    shrink = tl.exp2(top - safe)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, mass * shrink + tl.sum(weight, 1), acc


@triton.jit
def _join(partial, lse, first_part, parts, head, r, d, NUM_KV: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
    """Put the parts of a tile together."""
    top = tl.full((TILE,), -float("inf"), tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DIM), tl.float32)
    for i in range(0, parts):
        other = ((first_part + i) * NUM_KV + head).to(tl.int64) * TILE + r
        o_top = tl.load(lse + other * 2, cache_modifier=".cg")
        o_mass = tl.load(lse + other * 2 + 1, cache_modifier=".cg")
        o_acc = tl.load(partial + other[:, None] * DIM + d[None, :], cache_modifier=".cg")
        new_top = tl.maximum(top, o_top)
        # A part wholly outside the window has no maximum and no weight.
        a = tl.where(top == new_top, 1.0, tl.exp2(top - new_top))
        b = tl.where(o_top == new_top, 1.0, tl.exp2(o_top - new_top))
        mass = mass * a + o_mass * b
        acc = acc * a[:, None] + o_acc * b[:, None]
        top = new_top
    return acc / mass[:, None]


@triton.jit
def _prefill_kernel(
    q, k_cache, v_cache, out, page_table, slots, starts, lengths, offsets, pieces, partial, lse, arrivals,
    scale, stride_q, stride_page, stride_head, stride_table, stride_out,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    WORDS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    piece = pieces + tl.program_id(1) * WORDS
    row = tl.load(piece)
    packed = tl.load(piece + 1) * TILE
    begin = tl.load(piece + 2)
    end = tl.load(piece + 3)
    first_part = tl.load(piece + 4)
    parts = tl.load(piece + 5)
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    offset = tl.load(offsets + row)
    table = page_table + tl.load(slots + row).to(tl.int64) * stride_table
    r = tl.arange(0, TILE)
    m = (packed + r) // GROUP
    qo = head * GROUP + (packed + r) % GROUP
    d = tl.arange(0, DIM)
    t = tl.arange(0, BLOCK)
    here = m < length
    token = (offset + m).to(tl.int64)
    query = tl.load(q + token[:, None] * stride_q + qo[:, None] * DIM + d[None, :], mask=here[:, None], other=0.0)
    seen_from = start + m
    first = packed // GROUP
    # Everything before the tile's first token is seen by all of its tokens, unless a window hides it.
    whole = tl.minimum(tl.maximum((start + first) // BLOCK * BLOCK, begin), end)
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(start + first - WINDOW + 1, 0) // BLOCK * BLOCK)
        whole = begin
    keys = k_cache + head * stride_head
    values = v_cache + head * stride_head
    top = tl.full((TILE,), -float("inf"), tl.float32)
    mass = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, DIM), tl.float32)
    for at in range(begin, whole, BLOCK):
        if PAGE % BLOCK == 0:
            base = tl.load(table + at // PAGE).to(tl.int64) * stride_page + (at % PAGE + t) * DIM
        else:
            base = tl.load(table + (at + t) // PAGE).to(tl.int64) * stride_page + ((at + t) % PAGE) * DIM
        k = tl.load(keys + base[:, None] + d[None, :])
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        v = tl.load(values + base[:, None] + d[None, :])
        top, mass, acc = _fold(score, v, top, mass, acc)
    for at in range(whole, end, BLOCK):
        pos = at + t
        live = pos < end
        base = tl.load(table + pos // PAGE, mask=live, other=0).to(tl.int64) * stride_page + (pos % PAGE) * DIM
        k = tl.load(keys + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
        seen = (pos[None, :] <= seen_from[:, None]) & live[None, :]
        if WINDOW > 0:
            seen = seen & (pos[None, :] > seen_from[:, None] - WINDOW)
        score = tl.where(seen, tl.dot(query, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
        v = tl.load(values + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
        top, mass, acc = _fold(score, v, top, mass, acc)
    at_out = out + token[:, None] * stride_out + qo[:, None] * DIM + d[None, :]
    if parts <= 1:
        tl.store(at_out, (acc / mass[:, None]).to(out.dtype.element_ty), mask=here[:, None])
    else:
        own = ((first_part + tl.load(piece + 6)) * NUM_KV + head).to(tl.int64) * TILE + r
        tl.store(partial + own[:, None] * DIM + d[None, :], acc)
        tl.store(lse + own * 2, top)
        tl.store(lse + own * 2 + 1, mass)
        tl.debug_barrier()
        arrived = arrivals + first_part * NUM_KV + head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
            tl.debug_barrier()
            whole_out = _join(partial, lse, first_part, parts, head, r, d, NUM_KV, DIM, TILE)
            tl.store(at_out, whole_out.to(out.dtype.element_ty), mask=here[:, None])
            tl.store(arrived, 0)


def prefill_attention(
    ws: PrefillWorkspace, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, slots: torch.Tensor,
    starts: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, pieces: torch.Tensor, out: torch.Tensor, scale: float,
    window: int | None = None, *, warps: int = 8, stages: int | None = None,
) -> None:  # fmt: skip
    """Attend with the chunks of some rows, each token to those before it and itself.

    Args:
        ws: for the shape that the pieces were listed with.
        q: (num_tokens, num_qo_heads, head_dim), bf16, f16 or f32, device; rows may be strided.
        k_cache: (num_pages, num_kv_heads, page_size, head_dim), device; the chunk's own keys are in it.
        v_cache: like k_cache, of equal strides.
        page_table: (slots, columns), int32, device.
        slots: (rows,), int32, device; the line of the page table that each row reads.
        starts: (rows,), int32, device; tokens of the row before its chunk.
        lengths: (rows,), int32, device; tokens of the chunk; a piece of a row of length 0 does nothing.
        offsets: (rows,), int32, device; where the chunk begins in `q` and `out`.
        pieces: (num_pieces, PIECE_WORDS), int32, device, from `list_pieces`.
        out: (num_tokens, num_qo_heads, head_dim), device; the chunks' tokens are written.
        scale: factor on the scores before the softmax.
        window: tokens a token sees, itself included; None for all.
        warps: per program.
        stages: of the software pipeline; None takes what the memory of a multiprocessor allows.
    """
    num_qo, dim = q.shape[1], q.shape[2]
    num_kv, page = k_cache.shape[1], k_cache.shape[2]
    if stages is None:
        stages = 3 if q.dtype.itemsize * dim <= 256 else 1
    _prefill_kernel[(num_kv, pieces.shape[0])](
        q, k_cache, v_cache, out, page_table, slots, starts, lengths, offsets, pieces, ws.partial, ws.lse, ws.arrivals,
        scale * LOG2_E, q.stride(0), k_cache.stride(0), k_cache.stride(1), page_table.stride(0), out.stride(0),
        NUM_KV=num_kv, GROUP=num_qo // num_kv, DIM=dim, PAGE=page, TILE=TILE, BLOCK=_BLOCK, WORDS=PIECE_WORDS, WINDOW=window or 0,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
