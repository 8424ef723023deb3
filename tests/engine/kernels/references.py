"""Kernels in plain torch, for any device: what their tests compare them with where torch has no operation for it."""

import torch
import torch.nn.functional as F

from services.scheduler.engine.kernels.route import Routing


def _reference_heads(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    dtype, y = x.dtype, x.float()
    if weight is not None:
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)
        y = (y * weight).float()
    lo, hi = y.chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1).to(dtype)


def qkv_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_qo_heads: int,
    eps: float,
) -> None:
    """`qkv_norm_rope_store` in plain torch, for any device; same arguments and effects."""
    num_kv, page, dim = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    heads = qkv.view(qkv.shape[0], -1, dim)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, -1)
    query = _reference_heads(heads[:, :num_qo_heads], q_weight, cos, sin, eps)
    key = _reference_heads(heads[:, num_qo_heads : num_qo_heads + num_kv], k_weight, cos, sin, eps)
    heads[:, :num_qo_heads] = query
    live = slot_mapping >= 0
    slot = slot_mapping[live].long()
    k_cache[slot // page, :, slot % page] = key[live]
    v_cache[slot // page, :, slot % page] = heads[live, num_qo_heads + num_kv :]


def route_reference(
    logits: torch.Tensor, per_token: int, *, normalise: bool, mapping: torch.Tensor | None = None
) -> Routing:
    """`route` in plain torch, for any device; which of equals is taken is torch's choice."""
    weights, experts = torch.softmax(logits.float(), -1).topk(per_token, -1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = experts.int()
    if mapping is not None:
        padding = (mapping < 0)[:, None]
        experts = experts.masked_fill(padding, logits.shape[1])
        weights = weights.masked_fill(padding, 0.0)
    return Routing(experts, weights, logits.shape[1])


def experts_reference(
    x: torch.Tensor, gate_up_weight: torch.Tensor, down_weight: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """The whole of a layer's experts in plain torch, in the precision of its arguments, for any device."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(routing.num_experts):
        token, place = (routing.experts == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = F.linear(x[token], gate_up_weight[expert]).chunk(2, -1)
            answer = F.linear(F.silu(gate) * up, down_weight[expert])
            out.index_add_(0, token, answer.float() * routing.weights[token, place][:, None])
    return out.to(x.dtype)
