"""Which experts a token goes to, and the tokens of a step sorted by expert: all on the device, whatever the numbers.

`route` picks each token's experts from the router's numbers. `sort_pairs` lays the pairs of a token and one of its
experts out expert by expert, and lists tiles of them for the products. One program per expert counts the pairs that
come before its own, so that no program waits for another, nothing is known to the host, and a CUDA graph can hold it.

Tokens that pad a step go to no expert: they have the number behind the last one, and their pairs lie at the end.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain

_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of a step go.

    Attributes:
        experts: (num_tokens, per_token), int32, device; the likeliest first, `num_experts` for padding.
        weights: (num_tokens, per_token), float32, device; what each expert's answer counts.
        num_experts: of the layer.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    num_experts: int

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and one of its experts."""
        return self.experts.numel()

    @property
    def per_token(self) -> int:
        """Experts of a token."""
        return self.experts.shape[1]


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs by expert. A pair's number is token * per_token + which of the token's experts it is.

    Attributes:
        order: (num_pairs,), int32, device; the pair at each place.
        places: (num_pairs,), int32, device; the place of each pair.
        ends: (num_experts + 1,), int32, device; the place behind each expert's pairs, padding's last.
        tiles: (num_pairs // tile + num_experts, 4), int32, device: expert, first place, place behind the expert's
            last pair, nothing. An expert of -1 is no tile: there are as many as there could be.
        tile: places of a tile.
    """

    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor
    tiles: torch.Tensor
    tile: int


@triton.jit
def _route_kernel(
    logits, mapping, experts, weights, stride, num_experts,
    PER_TOKEN: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, NORMALISE: tl.constexpr, MAPPED: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    chain.follow(CHAIN)
    token = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    slot = tl.arange(0, PAD)
    left = e < num_experts
    x = tl.load(logits + token.to(tl.int64) * stride + e, mask=left, other=-float("inf")).to(tl.float32)
    # What is not a number comes last, so that there are always experts to go to; the answer is none either way.
    key = tl.where(x == x, x, -float("inf"))
    chance = tl.exp(x - tl.max(key, 0))
    chance = tl.where(left, chance, 0.0)
    total = tl.sum(chance, 0)
    chosen = tl.zeros((PAD,), tl.int32)
    weight = tl.zeros((PAD,), tl.float32)
    for i in tl.static_range(PER_TOKEN):
        top = tl.max(tl.where(left, key, -float("inf")), 0)
        expert = tl.min(tl.where(left & (key == top), e, BLOCK), 0)
        own = tl.sum(tl.where(e == expert, chance, 0.0), 0)
        chosen = tl.where(slot == i, expert, chosen)
        weight = tl.where(slot == i, own, weight)
        left = left & (e != expert)
    weight = weight / (tl.sum(weight, 0) if NORMALISE else total)
    if MAPPED:
        padding = tl.load(mapping + token) < 0
        chosen = tl.where(padding, num_experts, chosen)
        weight = tl.where(padding, 0.0, weight)
    tl.store(experts + token * PER_TOKEN + slot, chosen, mask=slot < PER_TOKEN)
    tl.store(weights + token * PER_TOKEN + slot, weight, mask=slot < PER_TOKEN)


def route(logits: torch.Tensor, per_token: int, *, normalise: bool, mapping: torch.Tensor | None = None) -> Routing:
    """Pick each token's experts: the largest of the softmax, the first of equals.

    Args:
        logits: (num_tokens, num_experts), device; rows may be strided.
        per_token: experts of a token, at most `num_experts`.
        normalise: the weights of a token's experts add up to one.
        mapping: (num_tokens,), int32, device; negative for tokens that are padding. None: there are none.
    """
    num_tokens, num_experts = logits.shape
    experts = torch.empty((num_tokens, per_token), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, per_token), dtype=torch.float32, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits, experts if mapping is None else mapping, experts, weights, logits.stride(0), num_experts,
        PER_TOKEN=per_token, PAD=triton.next_power_of_2(per_token), BLOCK=triton.next_power_of_2(num_experts),
        NORMALISE=normalise, MAPPED=mapping is not None, num_warps=1, **chain.options(),
    )  # fmt: skip
    return Routing(experts, weights, num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts, order, places, ends, tiles, num_pairs, num_experts, TILE: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    chain.follow(CHAIN)
    me = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    fewer = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for at in range(0, num_pairs, BLOCK):
        expert = tl.load(experts + at + i, mask=at + i < num_pairs, other=num_experts + 1)
        fewer += (expert < me).to(tl.int32)
        own += (expert == me).to(tl.int32)
    start = tl.sum(fewer, 0)
    end = start + tl.sum(own, 0)
    tl.store(ends + me, end)
    done = start
    for at in range(0, num_pairs, BLOCK):
        expert = tl.load(experts + at + i, mask=at + i < num_pairs, other=num_experts + 1)
        mine = expert == me
        place = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, at + i, mask=mine)
        tl.store(places + at + i, place, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
    # Experts before this one have at most start // TILE + me tiles, so its own may begin there, and what lies
    # between its last one and where the next expert's begin is no tile.
    first = start // TILE + me
    last = end // TILE + me + 1
    if me == num_experts:
        last = num_pairs // TILE + num_experts
    for at in range(first, last, BLOCK):
        tile = at + i
        begin = start + (tile - first) * TILE
        real = (begin < end) & (me < num_experts)
        tl.store(tiles + tile * 4, tl.where(real, me, -1), mask=tile < last)
        tl.store(tiles + tile * 4 + 1, begin, mask=tile < last)
        tl.store(tiles + tile * 4 + 2, begin * 0 + end, mask=tile < last)


def sort_pairs(routing: Routing, tile: int) -> SortedPairs:
    """Lay the pairs of a step out by expert; pairs of one expert stay in the order of their tokens.

    Args:
        routing: of the step.
        tile: pairs that one program of a product takes at most.
    """
    device, num_pairs, num_experts = routing.experts.device, routing.num_pairs, routing.num_experts
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    places = torch.empty(num_pairs, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    tiles = torch.empty((num_pairs // tile + num_experts, 4), dtype=torch.int32, device=device)
    _sort_kernel[(num_experts + 1,)](
        routing.experts, order, places, ends, tiles, num_pairs, num_experts,
        TILE=tile, BLOCK=_BLOCK, num_warps=4, **chain.options(),
    )  # fmt: skip
    return SortedPairs(order, places, ends, tiles, tile)
