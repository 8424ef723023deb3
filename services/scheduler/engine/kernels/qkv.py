"""Per-head norm, rotary embedding and KV store of one layer, as one Triton kernel over the merged QKV rows.

One program takes one token and one KV head: the query heads of its group, its key and its value. Queries
and keys are normalised (where the model does), rotated, queries written back in place, keys and values put
into their pages.
"""

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain


@triton.jit
def _rotate(lo, hi, cos, sin, w_lo, w_hi, eps, NORM: tl.constexpr, DIM: tl.constexpr, dtype: tl.constexpr):
    if NORM:
        mean = (tl.sum(lo * lo, 1) + tl.sum(hi * hi, 1)) / DIM
        inv = tl.rsqrt(mean + eps)[:, None]
        # Rounded before the weight, as the reference models do.
        lo = (lo * inv).to(dtype).to(tl.float32) * w_lo[None, :]
        hi = (hi * inv).to(dtype).to(tl.float32) * w_hi[None, :]
        lo = lo.to(dtype).to(tl.float32)
        hi = hi.to(dtype).to(tl.float32)
    return lo * cos - hi * sin, hi * cos + lo * sin


@triton.jit
def _qkv_kernel(
    qkv, q_weight, k_weight, cos_sin, positions, slot_mapping, k_cache, v_cache, eps,
    stride_qkv, stride_page, stride_head,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    chain.follow(CHAIN)
    token = tl.program_id(0)
    head = tl.program_id(1)
    dtype = qkv.dtype.element_ty
    HALF: tl.constexpr = DIM // 2
    d = tl.arange(0, HALF)
    g = tl.arange(0, GROUP_PAD)
    position = tl.load(positions + token)
    cos = tl.load(cos_sin + position * DIM + d)[None, :]
    sin = tl.load(cos_sin + position * DIM + HALF + d)[None, :]
    row = qkv + token * stride_qkv
    w_lo = tl.zeros((HALF,), tl.float32)
    w_hi = w_lo
    if NORM:
        w_lo = tl.load(q_weight + d).to(tl.float32)
        w_hi = tl.load(q_weight + HALF + d).to(tl.float32)
    heads = (g < GROUP)[:, None]
    at = row + (head * GROUP + g)[:, None] * DIM + d[None, :]
    lo = tl.load(at, mask=heads, other=0.0).to(tl.float32)
    hi = tl.load(at + HALF, mask=heads, other=0.0).to(tl.float32)
    lo, hi = _rotate(lo, hi, cos, sin, w_lo, w_hi, eps, NORM, DIM, dtype)
    tl.store(at, lo.to(dtype), mask=heads)
    tl.store(at + HALF, hi.to(dtype), mask=heads)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        one = tl.arange(0, 1)
        k_lo_w = w_lo
        k_hi_w = w_hi
        if NORM:
            k_lo_w = tl.load(k_weight + d).to(tl.float32)
            k_hi_w = tl.load(k_weight + HALF + d).to(tl.float32)
        key_at = row + (NUM_KV * GROUP + head + one)[:, None] * DIM + d[None, :]
        k_lo = tl.load(key_at).to(tl.float32)
        k_hi = tl.load(key_at + HALF).to(tl.float32)
        k_lo, k_hi = _rotate(k_lo, k_hi, cos, sin, k_lo_w, k_hi_w, eps, NORM, DIM, dtype)
        to = (slot // PAGE).to(tl.int64) * stride_page + head * stride_head + (slot % PAGE) * DIM
        cell = to + (one * 0)[:, None] + d[None, :]
        tl.store(k_cache + cell, k_lo.to(dtype))
        tl.store(k_cache + cell + HALF, k_hi.to(dtype))
        value_at = key_at + NUM_KV * DIM
        tl.store(v_cache + cell, tl.load(value_at))
        tl.store(v_cache + cell + HALF, tl.load(value_at + HALF))


def qkv_norm_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, cos_sin: torch.Tensor, positions: torch.Tensor,
    slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, num_qo_heads: int, eps: float,
) -> None:  # fmt: skip
    """Normalise, rotate and store one layer's projections; queries stay in `qkv`, in place.

    Args:
        qkv: (num_tokens, (num_qo_heads + 2 * num_kv_heads) * head_dim), device; rows may be strided.
        q_weight: (head_dim,) of the query norm, or None for models without.
        k_weight: (head_dim,) of the key norm, likewise.
        cos_sin: (max_position, head_dim), float32, device: cosines, then sines.
        positions: (num_tokens,), int32, device.
        slot_mapping: (num_tokens,), int32, device: page * page_size + place, or -1 for padding.
        k_cache: (num_pages, num_kv_heads, page_size, head_dim), device.
        v_cache: like k_cache, of equal strides.
        num_qo_heads: query heads in `qkv`.
        eps: of the norm.
    """
    num_tokens = qkv.shape[0]
    num_kv, page, dim = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    group = num_qo_heads // num_kv
    norm = q_weight is not None
    _qkv_kernel[(num_tokens, num_kv)](
        qkv, q_weight if norm else qkv, k_weight if norm else qkv, cos_sin, positions, slot_mapping, k_cache, v_cache, eps,
        qkv.stride(0), k_cache.stride(0), k_cache.stride(1),
        NUM_KV=num_kv, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), DIM=dim, PAGE=page, NORM=norm, num_warps=1, **chain.options(),
    )  # fmt: skip
