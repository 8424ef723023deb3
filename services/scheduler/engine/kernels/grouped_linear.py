"""Products of tokens with the weights of their experts, for steps with few tokens per expert, and the sum of answers.

Such a product costs what reading the weights costs. Every program takes one tile of the pairs that `sort_pairs` has
listed and a strip of its expert's outputs, so each strip is read once per tile, and experts without tokens are not
read at all. A pair's numbers are summed in the same order wherever it lies, and the answers of a token's experts are
added in the order of its experts: they do not depend on the tokens beside it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain
from services.scheduler.engine.kernels.route import Routing, SortedPairs


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a product is cut: outputs and inputs of one step of a program, its warps, and stages of its pipeline."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def _cut(tile: int, itemsize: int, *, gated: bool) -> _Cut:
    if itemsize > 2:
        return _Cut(32, 32, 4, 2)
    if tile == 16:
        return _Cut(32 if gated else 64, 128, 4, 4)
    return _Cut(64 if gated else 128, 64, 4, 4)


def tile_for(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile: small enough to be filled, large enough that few experts need a second one."""
    if num_pairs <= 8 * num_experts:
        return 16
    return 32 if num_pairs <= 24 * num_experts else 64


@triton.jit
def _tile_kernel(
    x, w, out, order, tiles, stride_x,
    SIZE: tl.constexpr, NUM_OUT: tl.constexpr, PER_TOKEN: tl.constexpr, GATED: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    chain.follow(CHAIN)
    tile = tiles + tl.program_id(1) * 4
    expert = tl.load(tile)
    if expert >= 0:
        place = tl.load(tile + 1) + tl.arange(0, TILE)
        here = place < tl.load(tile + 2)
        row = place
        if PER_TOKEN > 0:
            row = tl.load(order + place, mask=here, other=0) // PER_TOKEN
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        outputs = NUM_OUT * 2 if GATED else NUM_OUT
        inside = n < NUM_OUT
        at_x = x + row.to(tl.int64)[:, None] * stride_x + k[None, :]
        at_w = w + expert.to(tl.int64) * (outputs * SIZE) + n[None, :] * SIZE + k[:, None]
        acc = tl.zeros((TILE, BLOCK_N), tl.float32)
        other = tl.zeros((TILE, BLOCK_N), tl.float32)
        for at in range(0, SIZE, BLOCK_K):
            live = at + k < SIZE
            a = tl.load(at_x + at, mask=here[:, None] & live[None, :], other=0.0)
            b = tl.load(at_w + at, mask=inside[None, :] & live[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            if GATED:
                up = tl.load(at_w + NUM_OUT * SIZE + at, mask=inside[None, :] & live[:, None], other=0.0)
                other = tl.dot(a, up, other, input_precision="ieee")
        dtype = out.dtype.element_ty
        result = acc.to(dtype)
        if GATED:
            # Rounded where the plain form is.
            gate = result.to(tl.float32)
            gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
            result = (gate * other.to(dtype).to(tl.float32)).to(dtype)
        at_out = out + place.to(tl.int64)[:, None] * NUM_OUT + n[None, :]
        tl.store(at_out, result, mask=here[:, None] & inside[None, :])


def multiply(
    x: torch.Tensor, weight: torch.Tensor, pairs: SortedPairs, *, per_token: int = 0, gated: bool = False
) -> torch.Tensor:
    """Multiply each pair's numbers by a weight of its expert.

    Args:
        x: device; (num_tokens, size) with rows that may be strided when `per_token` is given, else (num_pairs, size)
            by place.
        weight: (num_experts, num_out, size), or (num_experts, 2 * num_out, size) when gated; contiguous, the dtype
            of x.
        pairs: of the step.
        per_token: experts of a token, where x are tokens.
        gated: silu of the first half of the outputs times the second half is what comes out.

    Returns:
        (num_pairs, num_out), by place; undefined at the places of padding.
    """
    num_out, size = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    cut = _cut(pairs.tile, x.dtype.itemsize, gated=gated)
    out = torch.empty((len(pairs.order), num_out), dtype=x.dtype, device=x.device)
    _tile_kernel[(triton.cdiv(num_out, cut.block_n), len(pairs.tiles))](
        x, weight, out, pairs.order, pairs.tiles, x.stride(0),
        SIZE=size, NUM_OUT=num_out, PER_TOKEN=per_token, GATED=gated,
        TILE=pairs.tile, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, num_warps=cut.warps, num_stages=cut.stages,
        **chain.options(),
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    answers, places, experts, weights, out, num_experts, size, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    chain.follow(CHAIN)
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < size
    pair = token * PER_TOKEN
    live = n < tl.where(tl.load(experts + pair) < num_experts, size, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PER_TOKEN):
        place = tl.load(places + pair + i).to(tl.int64)
        answer = tl.load(answers + place * size + n, mask=live, other=0.0).to(tl.float32)
        total += answer * tl.load(weights + pair + i)
    tl.store(out + token.to(tl.int64) * size + n, total.to(out.dtype.element_ty), mask=inside)


def combine(answers: torch.Tensor, pairs: SortedPairs, routing: Routing) -> torch.Tensor:
    """Add up the answers of each token's experts, by their weights, in float32; padding gets zeros.

    Args:
        answers: (num_pairs, size), device, contiguous, by place.
        pairs: of the step.
        routing: likewise.

    Returns:
        (num_tokens, size).
    """
    num_tokens, size = len(routing.experts), answers.shape[1]
    out = torch.empty((num_tokens, size), dtype=answers.dtype, device=answers.device)
    block = min(2048, triton.next_power_of_2(size))
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        answers, pairs.places, routing.experts, routing.weights, out, routing.num_experts, size,
        PER_TOKEN=routing.per_token, BLOCK=block, num_warps=4, **chain.options(),
    )  # fmt: skip
    return out
