"""Matrix products with weights laid out for the processor, chosen by what this build of torch offers.

A linear layer hands its weight over once and gets back a function of its input. Plain `F.linear` is the
reference and the only form in float32; on a CPU in bfloat16 the weight is reordered once for oneDNN instead of
at each call, and a checkpoint that holds 4-bit groups keeps them for small batches, where reading the weight is
what costs. Both are private operations of torch: each is tried on a small case first and left out when it is
missing or wrong.

The two packed forms round differently, so which one a token goes through must not hang on what else is in the step,
or on how much of a prompt was cached: tokens of prompts always take the wide form, tokens of decode rows take the
narrow one as long as those rows are few. Within a form a token's result does not depend on the tokens beside it.
Between the forms it differs by the rounding of each weight to bfloat16: the wide form is made from the narrow one's
weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, int], Tensor]
"""(num_tokens, in), and how many of the first tokens are those of decode rows -> (num_tokens, out)."""
_Form = Callable[[Tensor], Tensor]

GROUP: Final = 32
"""Weights that share a scale and a zero in the 4-bit form."""
MAX_INT4_TOKENS: Final = 6
"""Above this many decode rows the bfloat16 product is faster than the 4-bit one."""
_REORDER_TOKENS: Final = 32
"""Tokens per call that the reordered layout is tuned for; any number works."""


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """A weight as 4-bit groups along its rows: w = (q - 8) * scale + zero.

    Attributes:
        q: (out, in) uint8, 0 to 15.
        scale: (out, in / GROUP) float32.
        zero: (out, in / GROUP) float32.
    """

    q: Tensor
    scale: Tensor
    zero: Tensor

    def values(self) -> Tensor:
        """(out, in) float32: the weights as the narrow form computes with them, its scales and zeros in bfloat16."""
        scale, zero = (part.to(torch.bfloat16).float().repeat_interleave(GROUP, 1) for part in (self.scale, self.zero))
        return (self.q.float() - 8) * scale + zero


def plain(weight: Tensor, bias: Tensor | None) -> Product:
    """The reference: no copy, exact in float32."""
    return lambda x, _: F.linear(x, weight, bias)


def pack(weight: Tensor, bias: Tensor | None, int4: Int4Groups | None = None) -> Product:
    """Lay a weight out for its device.

    Args:
        weight: (out, in). In the packed forms it is copied and may be freed by its owner.
        bias: (out,) or None.
        int4: the same weight as its checkpoint holds it, when that is in 4-bit groups.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not has_reordered():
        return plain(weight, bias)
    if int4 is None or bias is not None or not has_int4() or weight.shape[0] % 16 or weight.shape[1] % GROUP:
        wide = _reordered(weight, bias)
        return lambda x, _: wide(x)
    return _by_kind(_int4(int4), _reordered(int4.values().to(weight.dtype), None))


def _by_kind(narrow: _Form, wide: _Form) -> Product:
    """Choose the form per token, by its kind."""

    def product(x: Tensor, num_decode: int) -> Tensor:
        if not 0 < num_decode <= MAX_INT4_TOKENS:
            return wide(x)
        if num_decode == len(x):
            return narrow(x)
        return torch.cat((narrow(x[:num_decode]), wide(x[num_decode:])))

    return product


def _reordered(weight: Tensor, bias: Tensor | None) -> _Form:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _REORDER_TOKENS)
    product = torch.ops.mkldnn._linear_pointwise.default
    empty: list[float] = []

    def form(x: Tensor) -> Tensor:
        # One token alone would go through a kernel of its own, which rounds differently.
        found: Tensor = product(x if len(x) > 1 else x.repeat(2, 1), packed, bias, "none", empty, "")
        return found if len(x) > 1 else found[:1]

    return form


def _int4(groups: Int4Groups) -> _Form:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.q.to(torch.int32), 2)
    pairs = torch.stack((groups.scale.t(), groups.zero.t()), -1).to(torch.bfloat16).contiguous()
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return lambda x: product(x, packed, GROUP, pairs)


@cache
def has_reordered() -> bool:
    """Whether this torch has oneDNN's reordered bfloat16 product, and it agrees with the reference."""
    weight = torch.linspace(-1, 1, 32 * 64).reshape(32, 64).to(torch.bfloat16)
    return _agrees(lambda: _reordered(weight, None), weight)


@cache
def has_int4() -> bool:
    """Whether this torch has the 4-bit product for CPUs, and it agrees with the reference."""
    q = (torch.arange(32 * 64) * 7 % 16).reshape(32, 64).to(torch.uint8)
    scale = torch.full((32, 2), 0.125)
    zero = torch.linspace(-0.5, 0.5, 64).reshape(32, 2).to(torch.bfloat16).float()
    weight = (q.float() - 8) * scale.repeat_interleave(GROUP, 1) + zero.repeat_interleave(GROUP, 1)
    return _agrees(lambda: _int4(Int4Groups(q, scale, zero)), weight)


def _agrees(build: Callable[[], _Form], weight: Tensor) -> bool:
    x = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).to(torch.bfloat16)
    try:
        found = build()(x).float()
    except (AttributeError, RuntimeError, TypeError):  # not in this build, or with another signature
        return False
    return bool(torch.allclose(found, F.linear(x.float(), weight.float()), rtol=0.03, atol=0.1))
