"""Causal attention of prompt chunks over paged keys and values, as one Triton kernel.

A tile is a run of tokens of one row; a program takes one tile and one query head and goes once over the pages
that the tile's tokens may see. The host lists the tiles, longest first, because it knows the lengths anyway;
beyond that nothing is planned. Keys of the prompt's own chunk are read from the pages too: they were stored
before.

Source: FlashAttention-2 (Dao, 2023), as in Triton's tutorial; the paging is our own.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels.decode_attention import LOG2_E

TILE: Final = 128
"""Tokens of one tile."""
_BLOCK: Final = 64


def list_tiles(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """List the tiles of some rows, those that read most first.

    Args:
        starts: (rows,) tokens of each row before its chunk.
        lengths: (rows,) tokens of the chunk.

    Returns:
        (num_tiles, 2) row, and tile within the row.
    """
    counts = -(-lengths // TILE)
    rows = np.repeat(np.arange(len(lengths)), counts)
    parts = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(-(starts[rows] + np.minimum((parts + 1) * TILE, lengths[rows])), kind="stable")
    return np.stack((rows, parts), 1)[order].astype(np.int32)


@triton.jit
def _prefill_kernel(
    q, k_cache, v_cache, out, page_table, slots, starts, lengths, offsets, tiles,
    scale, stride_q, stride_page, stride_head, stride_table, stride_out,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1) * TILE
    start = tl.load(starts + row)
    length = tl.load(lengths + row)
    offset = tl.load(offsets + row)
    table = page_table + tl.load(slots + row).to(tl.int64) * stride_table
    m = first + tl.arange(0, TILE)
    d = tl.arange(0, DIM)
    t = tl.arange(0, BLOCK)
    here = m < length
    token = (offset + m).to(tl.int64)
    query = tl.load(q + token[:, None] * stride_q + head * DIM + d[None, :], mask=here[:, None], other=0.0)
    seen_from = start + m
    end = start + tl.minimum(first + TILE, length)
    # Everything before the tile's first token is seen by all of its tokens, unless a window hides it.
    whole = (start + first) // BLOCK * BLOCK
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start + first - WINDOW + 1, 0) // BLOCK * BLOCK
        whole = begin
    keys = k_cache + (head // GROUP) * stride_head
    values = v_cache + (head // GROUP) * stride_head
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
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        mass = mass * shrink + tl.sum(weight, 1)
        v = tl.load(values + base[:, None] + d[None, :])
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    for at in range(whole, end, BLOCK):
        pos = at + t
        live = pos < end
        base = tl.load(table + pos // PAGE, mask=live, other=0).to(tl.int64) * stride_page + (pos % PAGE) * DIM
        k = tl.load(keys + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
        seen = (pos[None, :] <= seen_from[:, None]) & live[None, :]
        if WINDOW > 0:
            seen = seen & (pos[None, :] > seen_from[:, None] - WINDOW)
        score = tl.where(seen, tl.dot(query, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A token that sees nothing yet has no maximum; subtracting 0 keeps its weights at 0.
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(weight, 1)
        v = tl.load(values + base[:, None] + d[None, :], mask=live[:, None], other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    at_out = out + token[:, None] * stride_out + head * DIM + d[None, :]
    tl.store(at_out, (acc / mass[:, None]).to(out.dtype.element_ty), mask=here[:, None])


def prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
    lengths: torch.Tensor, offsets: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, scale: float, window: int | None = None,
    *, warps: int = 8, stages: int | None = None,
) -> None:  # fmt: skip
    """Attend with the chunks of some rows, each token to those before it and itself.

    Args:
        q: (num_tokens, num_qo_heads, head_dim), bf16, f16 or f32, device; rows may be strided.
        k_cache: (num_pages, num_kv_heads, page_size, head_dim), device; the chunk's own keys are in it.
        v_cache: like k_cache, of equal strides.
        page_table: (slots, columns), int32, device.
        slots: (rows,), int32, device; the line of the page table that each row reads.
        starts: (rows,), int32, device; tokens of the row before its chunk.
        lengths: (rows,), int32, device; tokens of the chunk.
        offsets: (rows,), int32, device; where the chunk begins in `q` and `out`.
        tiles: (num_tiles, 2), int32, device, from `list_tiles`.
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
    _prefill_kernel[(num_qo, tiles.shape[0])](
        q, k_cache, v_cache, out, page_table, slots, starts, lengths, offsets, tiles,
        scale * LOG2_E, q.stride(0), k_cache.stride(0), k_cache.stride(1), page_table.stride(0), out.stride(0),
        GROUP=num_qo // num_kv, DIM=dim, PAGE=page, TILE=TILE, BLOCK=_BLOCK, WINDOW=window or 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
