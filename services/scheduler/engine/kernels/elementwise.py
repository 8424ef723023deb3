"""The small kernels of a layer: add and norm, gated activation, and laying a step's tokens out.

Each has its plain form in torch in the layer that uses it, which is what runs on other devices.
"""

import torch
import triton
import triton.language as tl

from services.scheduler.engine.kernels import chain


@triton.jit
def _norm_kernel(x, residual, weight, out, eps, stride_x, stride_r, stride_out, size, BLOCK: tl.constexpr, ADD: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    chain.follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < size
    value = tl.load(x + row * stride_x + i, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * stride_r + i, mask=live, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * stride_r + i, rounded, mask=live)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    factor = tl.load(weight + i, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + i, (value * inverse * factor).to(out.dtype.element_ty), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise x, after adding it to a residual stream where one is given.

    Args:
        x: (num_rows, size), device; rows may be strided.
        weight: (size,).
        eps: added to the mean square.
        residual: like x, changed in place to the sum, which is what is normalised; None for x alone.

    Returns:
        (num_rows, size).
    """
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    stream = x if residual is None else residual
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](
        x, stream, weight, out, eps, x.stride(0), stream.stride(0), out.stride(0), size,
        BLOCK=block, ADD=residual is not None, num_warps=min(8, max(1, block // 512)), **chain.options(),
    )  # fmt: skip
    return out


@triton.jit
def _silu_kernel(gate_up, out, stride_in, stride_out, size, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    chain.follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    gate = tl.load(gate_up + row * stride_in + i, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_in + size + i, mask=live, other=0.0).to(tl.float32)
    # Rounded between the two, as the plain form is.
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * stride_out + i, (silu * up).to(out.dtype.element_ty), mask=live)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of (num_rows, 2 * size) with the gate first; (num_rows, size)."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_kernel[(rows, triton.cdiv(size, block))](
        gate_up, out, gate_up.stride(0), out.stride(0), size, BLOCK=block, num_warps=4, **chain.options()
    )
    return out


@triton.jit
def _embed_kernel(ids, weight, out, first, count, size, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    chain.follow(CHAIN)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    place = tl.load(ids + token) - first
    known = (place >= 0) & (place < count)
    value = tl.load(weight + tl.where(known, place, 0) * size + i, mask=live, other=0.0)
    tl.store(out + token * size + i, tl.where(known, value, 0.0), mask=live)


def embed_piece(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Embed the tokens that a piece of the vocabulary has; the others are zeros.

    Args:
        ids: (num_tokens,), int64, device.
        weight: (count, size), device, contiguous; the piece.
        first: id of its first token.

    Returns:
        (num_tokens, size).
    """
    (count, size), tokens = weight.shape, len(ids)
    out = torch.empty((tokens, size), dtype=weight.dtype, device=weight.device)
    block = 1024
    _embed_kernel[(tokens, triton.cdiv(size, block))](
        ids, weight, out, first, count, size, BLOCK=block, num_warps=4, **chain.options()
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _inputs_kernel(ids, token_slots, last_tokens, input_ids, pages, num_changes, table, num_tokens, BLOCK: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    chain.follow(CHAIN)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < num_tokens
    token = tl.load(ids + i, mask=live, other=0)
    unknown = live & (token < 0)
    slot = tl.load(token_slots + i, mask=unknown, other=0)
    drawn = tl.load(last_tokens + slot, mask=unknown, other=0)
    # What was drawn for a row of broken numbers is -1; that row has ended, but a step of it is still computed.
    tl.store(input_ids + i, tl.where(unknown, tl.maximum(drawn, 0), token).to(tl.int64), mask=live)
    changes = tl.load(num_changes)
    for at in range(tl.program_id(0) * BLOCK, changes, tl.num_programs(0) * BLOCK):
        c = at + tl.arange(0, BLOCK)
        mine = c < changes
        place = tl.load(pages + c * 2, mask=mine, other=0)
        tl.store(table + place, tl.load(pages + c * 2 + 1, mask=mine, other=0), mask=mine)


def lay_out_inputs(
    ids: torch.Tensor,
    token_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    input_ids: torch.Tensor,
    pages: torch.Tensor,
    num_changes: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Put in the tokens that only the device knows, and bring the page table up to date.

    Args:
        ids: (num_tokens,), int32, device; negative where the token is the slot's last one.
        token_slots: (num_tokens,), int32, device; read where `ids` is negative.
        last_tokens: (slots,), int32, device.
        input_ids: (num_tokens,), int64, device, written.
        pages: (capacity, 2), int32, device; place in the flat table, and the page that is there now.
        num_changes: (1,), int32, device; how many of `pages` count.
        table: (slots, columns), int32, device, changed.
    """
    num_tokens = ids.shape[0]
    _inputs_kernel[(triton.cdiv(num_tokens, 256),)](
        ids,
        token_slots,
        last_tokens,
        input_ids,
        pages,
        num_changes,
        table,
        num_tokens,
        BLOCK=256,
        num_warps=4,
        **chain.options(),
    )


@triton.jit
def _store_kernel(k, v, slot_mapping, k_cache, v_cache, stride_k, stride_v, stride_page, stride_head, DIM: tl.constexpr, PAGE: tl.constexpr, CHAIN: tl.constexpr):  # fmt: skip
    chain.follow(CHAIN)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        at = (slot // PAGE).to(tl.int64) * stride_page + head * stride_head + (slot % PAGE) * DIM + d
        tl.store(k_cache + at, tl.load(k + token * stride_k + head * DIM + d))
        tl.store(v_cache + at, tl.load(v + token * stride_v + head * DIM + d))


def store_kv(
    k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Write keys and values of new tokens into their pages.

    Args:
        k: (num_tokens, num_kv_heads, head_dim), device; rows may be strided.
        v: as k.
        slot_mapping: (num_tokens,), int32, device: page * page_size + place, or -1 for padding.
        k_cache: (num_pages, num_kv_heads, page_size, head_dim), device.
        v_cache: like k_cache, of equal strides.
    """
    tokens, heads, dim = k.shape
    _store_kernel[(tokens, heads)](
        k, v, slot_mapping, k_cache, v_cache, k.stride(0), v.stride(0), k_cache.stride(0), k_cache.stride(1),
        DIM=dim, PAGE=k_cache.shape[2], num_warps=1, **chain.options(),
    )  # fmt: skip
