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
def _block_kernel(logits, temperatures, seeds, limits, best, where, vocab, stride, blocks, FIRST: tl.constexpr, BLOCK: tl.constexpr, FILTER: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    chain.follow(CHAIN)
    row = tl.program_id(0)
    block = tl.program_id(1)
    QUARTER: tl.constexpr = BLOCK // 4
    e = tl.arange(0, QUARTER)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    # Blocks are those of the whole vocabulary; a piece of it may begin and end within one.
    global_block = FIRST // BLOCK + block
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
        at = global_block * BLOCK + j * QUARTER + e - FIRST
        live = at < vocab
        if FIRST % BLOCK:
            live = live & (at >= 0)
        x = tl.load(base + at, mask=live, other=-float("inf")).to(tl.float32)
        y = x * factor - _log2(_exponential(bits, CHAIN), CHAIN) * spread
        broken |= (y != y).to(tl.int32)
        if FILTER:
            y = tl.where(x < tl.load(limits + row), -float("inf"), y)
        top_id = tl.where(y > top, at, top_id)
        top = tl.maximum(top, y)
    # A row with a NaN anywhere reports NaN, and its request ends.
    best_score = tl.max(top, 0)
    value = tl.where(tl.max(broken, 0) > 0, float("nan"), best_score)
    index = tl.min(tl.where(top == best_score, top_id, 0x7FFFFFFF), 0) + FIRST
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
    stride_row,
    stride_block,
    stride_out,
    BLOCKS: tl.constexpr,
    FEED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    chain.follow(CHAIN)
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    place = row * stride_row + b * stride_block
    value = tl.load(best + place, mask=b < blocks, other=-float("inf"))
    top = tl.max(value, 0)
    # Nothing can be drawn where all is minus infinity, or something plus infinity.
    broken = (tl.sum((value != value).to(tl.int32), 0) > 0) | (tl.abs(top) == float("inf"))
    at = tl.argmax(tl.where(value != value, -float("inf"), value), 0)
    token = tl.where(broken, -1, tl.load(where + row * stride_row + at * stride_block))
    tl.store(out_value + row * stride_out, tl.where(broken, float("nan"), top))
    tl.store(out_id + row * stride_out, token)
    if FEED:
        tl.store(last_tokens + tl.load(slots + row), token)


def gumbel_sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    *,
    limits: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    feed: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Draw one token per row.

    Args:
        logits: (rows, vocab), bf16 or f32, device; rows may be strided.
        temperatures: (rows,), float32, device; 0 takes the likeliest.
        seeds: (rows,), int64, device; of this draw: a mix of the request's seed and the token's index.
        limits: (rows,), float32, device; entries with a smaller logit are left out. None keeps all.
        out: (rows,), int32, device; where the ids go, in place of a new tensor.
        feed: (slots of the rows, last token of each slot), int32, device; the second is written.

    Returns:
        (rows,) int32 token ids, -1 where the row's logits are not numbers.
    """
    best, where = _blocks(logits, temperatures, seeds, limits, 0)
    token = torch.empty(len(logits), dtype=torch.int32, device=logits.device) if out is None else out
    return _choose(best, where, (best.stride(0), 1), token, feed)


def gumbel_piece(logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, first_id: int) -> torch.Tensor:
    """Draw one token per row from a piece of the vocabulary; `gumbel_choose` takes it from there.

    Args:
        logits: (rows, size of the piece), bf16 or f32, device; rows may be strided.
        temperatures: (rows,), as of `gumbel_sample`.
        seeds: (rows,), likewise.
        first_id: id of the first column.

    Returns:
        (rows, 2) int32: the bits of the winning score, a float32 that is NaN where the row's logits are not
        numbers; and the id of the token.
    """
    best, where = _blocks(logits, temperatures, seeds, None, first_id)
    pairs = torch.empty((len(logits), 2), dtype=torch.int32, device=logits.device)
    _launch_rows(best, where, (best.stride(0), 1), pairs.view(torch.float32), pairs[:, 1], 2, None)
    return pairs


def gumbel_choose(pairs: torch.Tensor, out: torch.Tensor, feed: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Take the winner of each row among those of the pieces.

    Args:
        pairs: (pieces, rows, 2) from `gumbel_piece`, in the order of the vocabulary.
        out: (rows,), int32, device; where the ids go.
        feed: as of `gumbel_sample`.

    Returns:
        `out`, with -1 where the logits of a row are not numbers.
    """
    strides = (pairs.stride(1), pairs.stride(0))
    return _choose(pairs.view(torch.float32)[..., 0], pairs[..., 1], strides, out, feed)


def _blocks(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, limits: torch.Tensor | None, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and ids of the winner of each block; (rows, blocks) each."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(first_id % BLOCK + vocab, BLOCK)
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    _block_kernel[(rows, blocks)](
        logits, temperatures, seeds, temperatures if limits is None else limits, best, where, vocab, logits.stride(0),
        blocks, FIRST=first_id, BLOCK=BLOCK, FILTER=limits is not None, num_warps=4, **chain.options(),
    )  # fmt: skip
    return best, where


def _choose(
    best: torch.Tensor,
    where: torch.Tensor,
    strides: tuple[int, int],
    token: torch.Tensor,
    feed: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    score = torch.empty(len(token), dtype=torch.float32, device=token.device)
    _launch_rows(best, where, strides, score, token, 1, feed)
    return token


def _launch_rows(
    best: torch.Tensor,
    where: torch.Tensor,
    strides: tuple[int, int],
    out_value: torch.Tensor,
    out_id: torch.Tensor,
    stride_out: int,
    feed: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Find each row's winner among its blocks or pieces, at those strides of row and block."""
    rows, blocks = len(out_id), best.numel() // max(1, len(out_id))
    slots, last_tokens = (out_id, out_id) if feed is None else feed
    _row_kernel[(rows,)](
        best, where, slots, last_tokens, out_value, out_id, blocks, *strides, stride_out,
        BLOCKS=triton.next_power_of_2(blocks), FEED=feed is not None, num_warps=1, **chain.options(),
    )  # fmt: skip
