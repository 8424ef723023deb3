"""The experts of one to four tokens: so few pairs of token and expert that sorting them would cost more than it saves.

Every program reads its strip of one pair's expert straight away. The norm of the input is made again by every
program; the answers of a token's experts are added up, by their weights, where they come out, and go into the
residual stream in place.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain
from services.scheduler.engine.kernels.few_linear import make_input
from services.scheduler.engine.kernels.route import Routing

_TILE: Final = 8192
"""Numbers of a weight that one program holds at a time."""
_MAX_SIZE: Final = 8192


@triton.jit
def _gate_up_kernel(
    x, w, out, experts, norm_weight, eps, size, num_out, num_experts, stride_x,
    PER_TOKEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    chain.follow(CHAIN)
    pair = tl.program_id(1)
    expert = tl.load(experts + pair)
    if expert < num_experts:
        dtype = out.dtype.element_ty
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        inside = k < size
        at = w + (expert.to(tl.int64) * 2 * num_out + n[:, None]) * size + k[None, :]
        gates = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
        ups = tl.load(at + num_out.to(tl.int64) * size, mask=inside[None, :], other=0.0).to(tl.float32)
        value = make_input(x + (pair // PER_TOKEN) * stride_x, norm_weight, k, inside, eps, size, True, dtype)
        gate = tl.sum(gates * value[None, :], 1).to(dtype).to(tl.float32)
        up = tl.sum(ups * value[None, :], 1).to(dtype).to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
        tl.store(out + pair * num_out + n, (gate * up).to(dtype))


@triton.jit
def _down_kernel(
    inner, w, out, experts, weights, size, num_out, num_experts, stride_out,
    PER_TOKEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    chain.follow(CHAIN)
    token = tl.program_id(1)
    first = token * PER_TOKEN
    if tl.load(experts + first) < num_experts:
        dtype = out.dtype.element_ty
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        inside = k < size
        total = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.static_range(PER_TOKEN):
            expert = tl.load(experts + first + i).to(tl.int64)
            weight = tl.load(w + (expert * num_out + n[:, None]) * size + k[None, :], mask=inside[None, :], other=0.0)
            value = tl.load(inner + (first + i) * size + k, mask=inside, other=0.0).to(tl.float32)
            answer = tl.sum(weight.to(tl.float32) * value[None, :], 1).to(dtype).to(tl.float32)
            total += answer * tl.load(weights + first + i)
        at_out = out + token * stride_out + n
        result = total.to(dtype).to(tl.float32)
        tl.store(at_out, (tl.load(at_out).to(tl.float32) + result).to(dtype))


def fits(size: int, inner: int) -> bool:
    """Whether experts of these sizes can be multiplied here."""
    return max(size, inner) <= _MAX_SIZE and size % 16 == 0 and inner % 16 == 0


def add_few_experts(
    residual: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    norm: tuple[torch.Tensor, float],
) -> None:
    """Send a few tokens through their experts, and add the answers to the residual stream.

    Args:
        residual: (num_tokens, size), device, 16 bits a number; changed in place. Rows may be strided.
        gate_up: (num_experts, 2 * inner, size), the gate first; contiguous.
        down: (num_experts, size, inner), contiguous.
        routing: of the tokens.
        norm: weight (size,) and eps of the norm that the experts' input goes through.
    """
    num_tokens, size = residual.shape
    inner_size = down.shape[2]
    inner = torch.empty((routing.num_pairs, inner_size), dtype=residual.dtype, device=residual.device)
    block = triton.next_power_of_2(size)
    rows = max(1, min(4, _TILE // block))
    _gate_up_kernel[(inner_size // rows, routing.num_pairs)](
        residual, gate_up, inner, routing.experts, norm[0], norm[1], size, inner_size, routing.num_experts,
        residual.stride(0),
        PER_TOKEN=routing.per_token, BLOCK_N=rows, BLOCK_K=block, num_warps=4, **chain.options(),
    )  # fmt: skip
    block = triton.next_power_of_2(inner_size)
    rows = max(1, min(8, _TILE // block))
    _down_kernel[(size // rows, num_tokens)](
        inner, down, residual, routing.experts, routing.weights, inner_size, size, routing.num_experts,
        residual.stride(0),
        PER_TOKEN=routing.per_token, BLOCK_N=rows, BLOCK_K=block, num_warps=4, **chain.options(),
    )  # fmt: skip
