"""The smallest logit that top_k, top_p and min_p keep, found on the device without sorting.

Numbers of one format compare like integers once their bits are turned; so the border is searched digit by digit,
two bits at a time: count (for top_k) or weigh (for top_p) what lies at or above three candidates, and keep the
highest that still has enough. It is exact, equals at the border are kept, and no row waits for another: one
program per row, and rows without a filter end at once.
"""

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain


@triton.jit
def _order(x, BITS: tl.constexpr):
    """Bits of a number, turned so that they compare like the number: int32 from 0, or int64 for 32 bits."""
    if BITS == 16:
        raw = x.to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(raw < 0, -1 - raw, raw + 32768)
    else:
        raw = x.to(tl.int32, bitcast=True).to(tl.int64)
        return tl.where(raw < 0, -1 - raw, raw + 2147483648)


@triton.jit
def _number(key, like, BITS: tl.constexpr):
    """The number whose turned bits are `key`, as float32."""
    if BITS == 16:
        raw = tl.where(key < 32768, -1 - key, key - 32768).to(tl.int16)
        return raw.to(like, bitcast=True).to(tl.float32)
    else:
        raw = tl.where(key < 2147483648, -1 - key, key - 2147483648).to(tl.int32)
        return raw.to(tl.float32, bitcast=True)


@triton.jit
def _search(base, vocab, top, factor, floor_key, wanted, WEIGH: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Highest key at or above which there are `wanted` entries (or weight), among entries at or above floor_key."""
    i = tl.arange(0, BLOCK)
    found = floor_key * 0
    for digit in tl.static_range(BITS // 2):
        step = (floor_key * 0 + 1) << (BITS - 2 - 2 * digit)
        sum1 = tl.zeros((BLOCK,), tl.float32)
        sum2 = tl.zeros((BLOCK,), tl.float32)
        sum3 = tl.zeros((BLOCK,), tl.float32)
        for at in range(0, vocab, BLOCK):
            x = tl.load(base + at + i, mask=at + i < vocab, other=-float("inf"))
            key = _order(x, BITS)
            if WEIGH:
                weight = tl.where(key >= floor_key, tl.exp2((x.to(tl.float32) - top) * factor), 0.0)
            else:
                weight = tl.where(at + i < vocab, 1.0, 0.0)
            sum1 += tl.where(key >= found + step, weight, 0.0)
            sum2 += tl.where(key >= found + step * 2, weight, 0.0)
            sum3 += tl.where(key >= found + step * 3, weight, 0.0)
        enough1 = (tl.sum(sum1, 0) >= wanted).to(tl.int32)
        enough2 = (tl.sum(sum2, 0) >= wanted).to(tl.int32)
        enough3 = (tl.sum(sum3, 0) >= wanted).to(tl.int32)
        found += step * (enough1 + enough2 + enough3)
    return found


@triton.jit
def _limit_kernel(logits, temperatures, top_k, top_p, min_p, limits, vocab, stride, BITS: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    chain.follow(CHAIN)
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * stride
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    smallest = tl.load(min_p + row)
    limit = -float("inf")
    if (k > 0) | (p < 1.0) | (smallest > 0.0):
        i = tl.arange(0, BLOCK)
        factor = 1.4426950408889634 / tl.load(temperatures + row)
        high = tl.full((BLOCK,), -float("inf"), tl.float32)
        for at in range(0, vocab, BLOCK):
            x = tl.load(base + at + i, mask=at + i < vocab, other=-float("inf")).to(tl.float32)
            high = tl.maximum(high, x)
        top = tl.max(high, 0)
        floor_key = (tl.load(top_k + row) * 0).to(tl.int32 if BITS == 16 else tl.int64)
        if k > 0:
            wanted = k.to(tl.float32)
            floor_key = _search(base, vocab, top, factor, floor_key, wanted, False, BITS, BLOCK)
            limit = tl.maximum(limit, _number(floor_key, logits.dtype.element_ty, BITS))
        if p < 1.0:
            total = tl.zeros((BLOCK,), tl.float32)
            for at in range(0, vocab, BLOCK):
                x = tl.load(base + at + i, mask=at + i < vocab, other=-float("inf"))
                weight = tl.exp2((x.to(tl.float32) - top) * factor)
                total += tl.where(_order(x, BITS) >= floor_key, weight, 0.0)
            # The likeliest alone weighs 1, so a share of nothing still keeps it.
            wanted = tl.maximum(tl.sum(total, 0) * p, 1e-30)
            border = _search(base, vocab, top, factor, floor_key, wanted, True, BITS, BLOCK)
            limit = tl.maximum(limit, _number(border, logits.dtype.element_ty, BITS))
        if smallest > 0.0:
            limit = tl.maximum(limit, tl.minimum(top + tl.log2(smallest) / factor, top))
    tl.store(limits + row, limit)


def keep_limits(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Find what each row's filters keep, in the order top_k, top_p of what is left, min_p.

    Args:
        logits: (rows, vocab), bf16, f16 or f32, device; rows may be strided.
        temperatures: (rows,), float32, device; positive in rows with a filter.
        top_k: (rows,), int32, device; how many of the likeliest to keep, 0 for all.
        top_p: (rows,), float32, device; share of the probability to keep, 1 for all.
        min_p: (rows,), float32, device; share of the likeliest's probability that an entry must have, 0 for none.

    Returns:
        (rows,) float32, the smallest logit kept; minus infinity in rows without a filter.
    """
    rows, vocab = logits.shape
    limits = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _limit_kernel[(rows,)](
        logits, temperatures, top_k, top_p, min_p, limits, vocab, logits.stride(0),
        BITS=logits.dtype.itemsize * 8, BLOCK=8192, num_warps=16, **chain.options(),
    )  # fmt: skip
    return limits
