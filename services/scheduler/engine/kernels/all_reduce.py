"""Sums over the ranks of a host for small tensors, by kernels that write to each other's memory.

Every rank writes its numbers into a place of its own in the memory of each other, and adds up what it finds in its
own memory: one crossing of the link, where a ring takes several. The sum is made in float32 in the order of the
ranks, so all ranks have the same one to the last bit.

A program is a channel: it works with the program of the same number on the other ranks and with nobody else, and
counts its own calls. Places alternate between two halves. Who writes for call n has read what the others wrote for
call n - 1, so these have ended call n - 2, whose half it is: nothing needs to be acknowledged.

Small tensors travel word by word with the number of the call beside each, and whoever finds that number has the word:
nothing need be ordered. Larger ones travel alone, and one flag per channel says that they are there.

Source: the two protocols are those of NCCL (LL and Simple) and of custom all-reduce kernels since; written anew.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain

CHANNELS: Final = 128
"""Programs of a call at most; fewer than a GPU has multiprocessors, as they wait for each other."""
SMALL_WORDS: Final = 4096
"""Words of four bytes per channel that have places beside the number of the call."""
LARGE_WORDS: Final = 8192
"""Words per channel that have places of their own."""
ARRIVED: Final = (1 << 32) | 1
"""Where places and flags hold this, the first call of a channel finds all that it would wait for."""
_SMALL_TILE: Final = 1024
"""Words of a channel of a small tensor."""
_TILE: Final = 2048


@dataclass(frozen=True, slots=True)
class PeerPlaces:
    """Where the ranks write to each other.

    Attributes:
        addresses: (ranks,) int64, device; address of each rank's piece of memory, of `num_words` words of eight
            bytes, as this rank reaches it. They were zero before the first call.
        calls: (2, CHANNELS) int32, device; calls so far of each channel, small ones and large ones.
        rank: this one.
        ranks: how many there are.
    """

    addresses: torch.Tensor
    calls: torch.Tensor
    rank: int
    ranks: int

    @property
    def first_large(self) -> int:
        """Where the places of large tensors begin, in words of eight bytes."""
        return 2 * self.ranks * CHANNELS * SMALL_WORDS


def num_words(ranks: int) -> int:
    """Size of a rank's piece, in words of eight bytes: places of small tensors, of large ones, and flags."""
    return ranks * CHANNELS * (2 * SMALL_WORDS + LARGE_WORDS) + ranks * CHANNELS


@triton.jit
def add_words(low, high, word, WIDTH: tl.constexpr, like: tl.constexpr):
    """Add the one or two numbers of each word to float32 sums."""
    if WIDTH == 4:
        return low + word.to(tl.float32, bitcast=True), high
    else:
        return (
            low + word.to(tl.int16).to(like, bitcast=True).to(tl.float32),
            high + (word >> 16).to(tl.int16).to(like, bitcast=True).to(tl.float32),
        )


@triton.jit
def pack_words(low, high, WIDTH: tl.constexpr, like: tl.constexpr):
    """Make words of sums."""
    if WIDTH == 4:
        return low.to(tl.int32, bitcast=True)
    else:
        lower = low.to(like).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return lower | (high.to(like).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def arrived(place, live, call):
    """Wait for words that travel beside the number of the call."""
    found = tl.load(place, mask=live, other=0, volatile=True)
    while tl.max((live & ((found >> 32).to(tl.int32) != call)).to(tl.int32), 0) > 0:
        found = tl.load(place, mask=live, other=0, volatile=True)
    return found.to(tl.int32)


@triton.jit
def exchange_flags(addresses, own, offset, channel, call, RANK: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Say that what this program has written for the others is there, and wait until theirs is."""
    tl.debug_barrier()
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + offset
            flag = there.to(tl.pointer_type(tl.int32)) + RANK * CHANNELS + channel
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = (own + offset).to(tl.pointer_type(tl.int32)) + rank * CHANNELS + channel
            found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            # Who has this rank's flag may have gone on to the next call already, and no further.
            while found - call < 0:
                found = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _small_kernel(x, out, size, addresses, calls, RANK: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, like: tl.constexpr, GATHER: tl.constexpr, TILE: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    i = tl.arange(0, TILE)
    at = channel * TILE + i
    live = at < size
    chain.follow(CHAIN)
    call = tl.load(calls + channel) + 1
    half = call & 1
    mine = tl.load(x + at, mask=live, other=0)
    sent = (mine.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
            place = there + ((half * RANKS + RANK) * CHANNELS + channel) * WORDS
            tl.store(tl.multiple_of(place, 16) + i, sent, mask=live)
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros((TILE,), tl.float32)
    high = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(RANKS):
        word = mine
        if rank != RANK:
            place = tl.multiple_of(own + ((half * RANKS + rank) * CHANNELS + channel) * WORDS, 16) + i
            word = arrived(place, live, call)
        if GATHER:
            tl.store(out + rank * size + at, word, mask=live)
        else:
            low, high = add_words(low, high, word, WIDTH, like)
    if not GATHER:
        tl.store(out + at, pack_words(low, high, WIDTH, like), mask=live)
    tl.store(calls + channel, call)


@triton.jit
def _large_kernel(x, out, size, per_channel, addresses, calls, RANK: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, like: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    channel = tl.program_id(0)
    i = tl.arange(0, TILE)
    begin = channel * per_channel
    end = tl.minimum(begin + per_channel, size)
    flags: tl.constexpr = FIRST + RANKS * CHANNELS * WORDS
    chain.follow(CHAIN)
    call = tl.load(calls + channel) + 1
    half = call & 1
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64))
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.load(addresses + rank).to(tl.pointer_type(tl.int64)) + FIRST
            place = there.to(tl.pointer_type(tl.int32)) + ((half * RANKS + RANK) * CHANNELS + channel) * WORDS
            for at in range(0, end - begin, TILE):
                live = begin + at + i < end
                word = tl.load(x + begin + at + i, mask=live)
                tl.store(tl.multiple_of(place, 16) + at + i, word, mask=live)
    exchange_flags(addresses, own, flags, channel, call, RANK, RANKS, CHANNELS)
    for at in range(0, end - begin, TILE):
        live = begin + at + i < end
        low = tl.zeros((TILE,), tl.float32)
        high = tl.zeros((TILE,), tl.float32)
        for rank in tl.static_range(RANKS):
            if rank == RANK:
                word = tl.load(x + begin + at + i, mask=live, other=0)
            else:
                place = (own + FIRST).to(tl.pointer_type(tl.int32))
                place = tl.multiple_of(place + ((half * RANKS + rank) * CHANNELS + channel) * WORDS, 16)
                word = tl.load(place + at + i, mask=live, other=0, cache_modifier=".cg")
            low, high = add_words(low, high, word, WIDTH, like)
        tl.store(out + begin + at + i, pack_words(low, high, WIDTH, like), mask=live)
    tl.store(calls + channel, call)


LIKE: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def fits(x: torch.Tensor, ranks: int) -> bool:
    """Whether a tensor can be added up here, and is small enough to be sent whole to each of the others."""
    return x.dtype in LIKE and 0 < x.nbytes * (ranks - 1) <= 4 * CHANNELS * LARGE_WORDS and x.nbytes % 4 == 0


def fits_gather(x: torch.Tensor) -> bool:
    """Whether the pieces of a tensor can be put together here."""
    return 0 < x.nbytes <= 4 * CHANNELS * _SMALL_TILE and x.nbytes % 4 == 0


def all_reduce(x: torch.Tensor, places: PeerPlaces) -> torch.Tensor:
    """Add up a contiguous tensor over the ranks; may be captured. All ranks make the same calls in the same order."""
    words, out = x.view(-1).view(torch.int32), torch.empty_like(x)
    size = len(words)
    options = {"RANK": places.rank, "RANKS": places.ranks, "CHANNELS": CHANNELS, "WIDTH": x.dtype.itemsize}
    into = out.view(-1).view(torch.int32)
    if size <= CHANNELS * _SMALL_TILE:
        _small_kernel[(triton.cdiv(size, _SMALL_TILE),)](
            words, into, size, places.addresses, places.calls[0],
            WORDS=SMALL_WORDS, TILE=_SMALL_TILE, like=LIKE[x.dtype], GATHER=False, num_warps=8, **options, **chain.options(),
        )  # fmt: skip
        return out
    per_channel = triton.cdiv(triton.cdiv(size, CHANNELS), 4) * 4
    _large_kernel[(triton.cdiv(size, per_channel),)](
        words, into, size, per_channel, places.addresses, places.calls[1],
        WORDS=LARGE_WORDS, FIRST=places.first_large, TILE=_TILE, like=LIKE[x.dtype],
        num_warps=8, **options, **chain.options(),
    )  # fmt: skip
    return out


def all_gather(x: torch.Tensor, places: PeerPlaces) -> torch.Tensor:
    """Put the ranks' tensors, contiguous and of one shape, behind each other: (ranks, *shape); may be captured."""
    words = x.view(-1).view(torch.int32)
    out = torch.empty((places.ranks, *x.shape), dtype=x.dtype, device=x.device)
    _small_kernel[(triton.cdiv(len(words), _SMALL_TILE),)](
        words, out.view(-1).view(torch.int32), len(words), places.addresses, places.calls[0],
        RANK=places.rank, RANKS=places.ranks, CHANNELS=CHANNELS, WORDS=SMALL_WORDS, TILE=_SMALL_TILE, WIDTH=4,
        like=tl.float32, GATHER=True, num_warps=8, **chain.options(),
    )  # fmt: skip
    return out
