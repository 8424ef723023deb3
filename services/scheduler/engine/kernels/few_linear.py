"""A linear layer for one to four tokens, with what comes before and after it in the same kernel.

With few tokens a product costs what reading its weight costs. So every program asks for its whole piece of the
weight at once, before it waits for the kernel that makes its input: the two overlap. The norm of the input is made
again by every program, gate and up are multiplied where they come out, and what is added to the residual stream is
added in place.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain

MAX_TOKENS: Final = 4
_TILE: Final = 8192
"""Numbers of a weight that one program holds."""
_MAX_SIZE: Final = 8192


@triton.jit
def make_input(x, norm_weight, k, inside, eps, size, NORM: tl.constexpr, dtype: tl.constexpr):
    """One token's numbers in float32, through a norm where there is one."""
    value = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
        factor = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
        value = (value * inverse * factor).to(dtype).to(tl.float32)
    return value


@triton.jit
def _few_kernel(
    x, w, out, norm_weight, eps, size, num_out, stride_x, stride_out,
    TOKENS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = k < size
    at = w + n[:, None].to(tl.int64) * size + k[None, :]
    # Weights never change, so they may be read before the kernels ahead have ended.
    weight = tl.load(at, mask=inside[None, :], other=0.0)
    other = weight
    if GATED:
        other = tl.load(at + num_out.to(tl.int64) * size, mask=inside[None, :], other=0.0)
    chain.follow(CHAIN)
    for m in tl.static_range(TOKENS):
        value = make_input(x + m * stride_x, norm_weight, k, inside, eps, size, NORM, dtype)
        result = tl.sum(weight.to(tl.float32) * value[None, :], 1).to(dtype)
        at_out = out + m * stride_out + n
        if GATED:
            up = tl.sum(other.to(tl.float32) * value[None, :], 1).to(dtype).to(tl.float32)
            gate = result.to(tl.float32)
            gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
            result = (gate * up).to(dtype)
        if ADD:
            result = (tl.load(at_out).to(tl.float32) + result.to(tl.float32)).to(dtype)
        tl.store(at_out, result)


def fits(num_out: int, size: int) -> bool:
    """Whether a weight of (num_out, size) can be multiplied here."""
    return size <= _MAX_SIZE and num_out % 16 == 0


def few_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply one to four tokens by a weight.

    Args:
        x: (tokens, size), device; rows may be strided.
        weight: (num_out, size), or (2 * num_out, size) when gated; contiguous, the dtype of x.
        norm: weight (size,) and eps of the norm that x goes through first.
        gated: silu of the first half of the outputs times the second half is what comes out.
        add_to: (tokens, num_out), changed in place: the product is added to it.

    Returns:
        (tokens, num_out): the product, or `add_to`.
    """
    rows, size = x.shape
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    block_k = triton.next_power_of_2(size)
    block_n = max(1, min(4 if gated and rows > 2 else 8, _TILE // block_k))
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device) if add_to is None else add_to
    _few_kernel[(num_out // block_n,)](
        x, weight, out, weight if norm is None else norm[0], 0.0 if norm is None else norm[1], size, num_out,
        x.stride(0), out.stride(0),
        TOKENS=rows, NORM=norm is not None, GATED=gated, ADD=add_to is not None, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4, **chain.options(),
    )  # fmt: skip
    return out
