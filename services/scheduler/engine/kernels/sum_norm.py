"""The sum over the ranks of a host, the residual stream and the norm behind them, as one kernel.

The ends of a rank's half layer: what each rank has computed is added up, the sum is added to the residual stream, and
the stream is normalised for what comes next. It is the protocol and the places of `all_reduce`, with rows of the
stream for pieces: a channel has whole rows, so it can normalise them. Sums are rounded as those of `all_reduce` are:
both give the same numbers.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import all_reduce, chain
from services.scheduler.engine.kernels.all_reduce import (
    LIKE,
    PeerPlaces,
    add_words,
    arrived,
    exchange_flags,
    pack_words,
)

SMALL_ROWS: Final = 64
"""Up to so many, twice the bytes are on their way sooner than a flag behind them."""


@triton.jit
def _norm_row(low, high, stream, factors, residual, out, at, live, size, eps, BLOCK: tl.constexpr, WIDTH: tl.constexpr, like: tl.constexpr):  # fmt: skip
    """Add a row's sum to its residual stream, and write the norm of that."""
    zero = tl.zeros((BLOCK,), tl.float32)
    # Rounded between the two, as it is where they are kernels of their own.
    low, high = add_words(zero, zero, pack_words(low, high, WIDTH, like), WIDTH, like)
    low, high = add_words(low, high, stream, WIDTH, like)
    rounded = pack_words(low, high, WIDTH, like)
    tl.store(residual + at, rounded, mask=live)
    low, high = add_words(zero, zero, rounded, WIDTH, like)
    squares = tl.where(live, low * low + high * high, 0.0)
    inverse = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    factor, other = add_words(zero, zero, factors, WIDTH, like)
    tl.store(out + at, pack_words(low * inverse * factor, high * inverse * other, WIDTH, like), mask=live)


@triton.jit
def _small_kernel(x, residual, weight, out, words, size, eps, addresses, calls, RANK: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, like: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    live = i < words
    at = row * words + i
    factors = tl.load(weight + i, mask=live, other=0)  # weights never change
    chain.follow(CHAIN)
    call = tl.load(calls + row) + 1
    half = call & 1
    mine = tl.load(x + at, mask=live, other=0)
    sent = (mine.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
            place = there + ((half * RANKS + RANK) * CHANNELS + row) * WORDS
            tl.store(tl.multiple_of(place, 16) + i, sent, mask=live)
    stream = tl.load(residual + at, mask=live, other=0)
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        word = mine
        if rank != RANK:
            place = tl.multiple_of(own + ((half * RANKS + rank) * CHANNELS + row) * WORDS, 16) + i
            word = arrived(place, live, call)
        low, high = add_words(low, high, word, WIDTH, like)
    _norm_row(low, high, stream, factors, residual, out, at, live, size, eps, BLOCK, WIDTH, like)
    tl.store(calls + row, call)


@triton.jit
def _large_kernel(x, residual, weight, out, rows, per_channel, words, size, eps, addresses, calls, RANK: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, like: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    live = i < words
    begin = channel * per_channel
    count = tl.minimum(per_channel, rows - begin)
    factors = tl.load(weight + i, mask=live, other=0)
    chain.follow(CHAIN)
    call = tl.load(calls + channel) + 1
    half = call & 1
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64))
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + FIRST
            place = there.to(tl.pointer_type(tl.int32)) + ((half * RANKS + RANK) * CHANNELS + channel) * WORDS
            for row in range(0, count):
                word = tl.load(x + (begin + row) * words + i, mask=live)
                tl.store(tl.multiple_of(place, 16) + row * words + i, word, mask=live)
    exchange_flags(addresses, own, FIRST + RANKS * CHANNELS * WORDS, channel, call, RANK, RANKS, CHANNELS)
    for row in range(0, count):
        at = (begin + row) * words + i
        stream = tl.load(residual + at, mask=live, other=0)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                word = tl.load(x + at, mask=live, other=0)
            else:
                place = (own + FIRST).to(tl.pointer_type(tl.int32))
                place = tl.multiple_of(place + ((half * RANKS + rank) * CHANNELS + channel) * WORDS, 16)
                word = tl.load(place + row * words + i, mask=live, other=0, cache_modifier=".cg")
            low, high = add_words(low, high, word, WIDTH, like)
        _norm_row(low, high, stream, factors, residual, out, at, live, size, eps, BLOCK, WIDTH, like)
    tl.store(calls + channel, call)


def fits(x: torch.Tensor, ranks: int) -> bool:
    """Whether rows can be added up and normalised here."""
    if x.dim() != 2 or not all_reduce.fits(x, ranks):
        return False
    words, rest = divmod(x.shape[1] * x.dtype.itemsize, 4)
    if rest or words > all_reduce.SMALL_WORDS:
        return False
    per_channel: int = triton.cdiv(len(x), all_reduce.CHANNELS)
    return per_channel * words <= all_reduce.LARGE_WORDS


def sum_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, places: PeerPlaces
) -> torch.Tensor:
    """Add up what the ranks have, add that to the residual stream, and normalise it; may be captured.

    Args:
        x: (rows, size), contiguous, device; this rank's summand.
        residual: like x, changed in place to the stream.
        weight: (size,) of the norm.
        eps: added to the mean square.
        places: all ranks make the same calls in the same order.

    Returns:
        (rows, size).
    """
    rows, size = x.shape
    out = torch.empty_like(x)
    ints = [each.view(-1).view(torch.int32) for each in (x, residual, weight, out)]
    words = size * x.dtype.itemsize // 4
    block = triton.next_power_of_2(words)
    options = {
        "RANK": places.rank, "RANKS": places.ranks, "CHANNELS": all_reduce.CHANNELS, "BLOCK": block,
        "WIDTH": x.dtype.itemsize, "like": LIKE[x.dtype], "num_warps": min(8, max(1, block // 256)),
    }  # fmt: skip
    if rows <= SMALL_ROWS:
        _small_kernel[(rows,)](
            *ints, words, size, eps, places.addresses, places.calls[0],
            WORDS=all_reduce.SMALL_WORDS, **options, **chain.options(),
        )  # fmt: skip
        return out
    per_channel = triton.cdiv(rows, all_reduce.CHANNELS)
    _large_kernel[(triton.cdiv(rows, per_channel),)](
        *ints, rows, per_channel, words, size, eps, places.addresses, places.calls[1],
        WORDS=all_reduce.LARGE_WORDS, FIRST=places.first_large, **options, **chain.options(),
    )  # fmt: skip
    return out
