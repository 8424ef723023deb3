"""Drawing one token per row straight from bf16 logits, by the Gumbel-max trick, in two small kernels.

The noise of a vocabulary entry depends on (seed of the draw, id of the entry) alone: not on the row, the
batch, the block or the rank that holds the entry. So a request draws alike in any company, and with a
sharded vocabulary each rank finds its own maximum and the largest wins.

Source: Gumbel-max sampling; the counter-based generator is Philox (Salmon et al., 2011) as Triton ships it.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from services.scheduler.engine.kernels import chain

BLOCK = 4096
"""Fixed: the counter of an entry is derived from its place in its block."""


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Base-2 logarithm; the fast one is one instruction, with an absolute error of about 2e-7."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def _exponential(bits, FAST: tl.constexpr):
    """A number of the exponential distribution from 32 random bits.

    It is -ln(1 - v) of v in (0, 1) with 23 random bits. Small v, which decide who wins, go through the series:
    there the logarithm of a number close to 1 would be rounding alone.
    """
    v = ((bits.to(tl.uint32, bitcast=True) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.99999994
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * 0.25)))
    return tl.where(v < 0.03125, series, _log2(1.0 - v, FAST) * -0.6931472)


@triton.jit
def _block_kernel(logits, temperatures, seeds, limits, best, where, vocab, first_id, stride, blocks, BLOCK: tl.constexpr, FILTER: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    chain.follow(CHAIN)
    row = tl.program_id(0)
    block = tl.program_id(1)
    QUARTER: tl.constexpr = BLOCK // 4
    e = tl.arange(0, QUARTER)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    global_block = first_id // BLOCK + block
    # Seven rounds of Philox pass every known test of randomness; the default of ten only costs time.
    r0, r1, r2, r3 = tl.randint4x(seed, global_block * QUARTER + e, n_rounds=7)
    top = tl.full((QUARTER,), -float("inf"), tl.float32)
    top_id = tl.zeros((QUARTER,), tl.int32)
    broken = tl.zeros((QUARTER,), tl.int32)
    base = logits + row.to(tl.int64) * stride
    # In powers of two throughout: the order of the scores is the same, and the logarithm of a GPU is that one.
    factor = tl.where(temperature > 0.0, 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0), 1.0)
    spread = tl.where(temperature > 0.0, 1.0, 0.0)
    for j in tl.static_range(4):
        bits = r0 if j == 0 else (r1 if j == 1 else (r2 if j == 2 else r3))
        at = block * BLOCK + j * QUARTER + e
        x = tl.load(base + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        y = x * factor - _log2(_exponential(bits, CHAIN), CHAIN) * spread
        broken |= (y != y).to(tl.int32)
        if FILTER:
            y = tl.where(x < tl.load(limits + row), -float("inf"), y)
        top_id = tl.where(y > top, at, top_id)
        top = tl.maximum(top, y)
    # A row with a NaN anywhere reports NaN, and its request ends.
    best_score = tl.max(top, 0)
    value = tl.where(tl.max(broken, 0) > 0, float("nan"), best_score)
    index = tl.min(tl.where(top == best_score, top_id, 0x7FFFFFFF), 0) + first_id
    tl.store(best + row * blocks + block, value)
    tl.store(where + row * blocks + block, index)


@triton.jit
def _row_kernel(
    best,
    where,
    slots,
    last_tokens,
    out_value,
    out_id,
    blocks,
    BLOCKS: tl.constexpr,
    FEED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    chain.follow(CHAIN)
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    value = tl.load(best + row * blocks + b, mask=b < blocks, other=-float("inf"))
    top = tl.max(value, 0)
    # Nothing can be drawn where all is minus infinity, or something plus infinity.
    broken = (tl.sum((value != value).to(tl.int32), 0) > 0) | (tl.abs(top) == float("inf"))
    at = tl.argmax(tl.where(value != value, -float("inf"), value), 0)
    token = tl.where(broken, -1, tl.load(where + row * blocks + at))
    tl.store(out_value + row, tl.where(broken, float("nan"), top))
    tl.store(out_id + row, token)
    if FEED:
        tl.store(last_tokens + tl.load(slots + row), token)


def gumbel_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    first_id: int = 0,
    *,
    limits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    feed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: (rows, vocab), bf16 or f32, device; rows may be strided.
        temperatures: (rows,), float32, device; 0 takes the likeliest.
        seeds: (rows,), int64, device; of this draw: a mix of the request's seed and the token's index.
        first_id: id of the first column, a multiple of BLOCK, for a sharded vocabulary.
        limits: (rows,), float32, device; entries with a smaller logit are left out. None keeps all.
        out: (rows,), int32, device; where the ids go, in place of a new tensor.
        feed: (slots of the rows, last token of each slot), int32, device; the second is written.

    Returns:
        (rows,) float32 winning scores, to compare between ranks, NaN where the row's logits are not numbers;
        (rows,) int32 token ids, -1 there.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    _block_kernel[(rows, blocks)](
        logits, temperatures, seeds, temperatures if limits is None else limits, best, where, vocab, first_id, logits.stride(0), blocks,
        BLOCK=BLOCK, FILTER=limits is not None, num_warps=4, **chain.options(),
    )  # fmt: skip
    value = torch.empty(rows, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    slots, last_tokens = (token, token) if feed is None else feed
    _row_kernel[(rows,)](
        best, where, slots, last_tokens, value, token, blocks,
        BLOCKS=triton.next_power_of_2(blocks), FEED=feed is not None, num_warps=1, **chain.options(),
    )  # fmt: skip
    return value, token
