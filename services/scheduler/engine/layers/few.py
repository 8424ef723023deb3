"""A decoder layer for one to four tokens: the same numbers with fewer and narrower kernels.

Norms, the gated activation and the sums of the residual stream go into the products beside them. Knows which
layers have that form; the arithmetic is the kernel's.
"""

from typing import Final, Protocol

from torch import Tensor

from services.scheduler.engine.context import ForwardContext
from services.scheduler.engine.layers.attention import Attention
from services.scheduler.engine.layers.linear import Linear
from services.scheduler.engine.layers.norm import RMSNorm
from services.scheduler.engine.layers.rotary import Angles

_MAX_HIDDEN: Final = 2560
"""Every program makes the norm of the whole input again; of larger models the products are well read as they are."""


class FewFeedForward(Protocol):
    """The feed-forward part of such a layer."""

    def __call__(self, residual: Tensor, context: ForwardContext) -> None:
        """Norm the (num_tokens, hidden_size) residual stream, and add what comes of it, in place."""
        ...


class FewLayer:
    """The parts of a layer, called in another way."""

    def __init__(
        self, norm: RMSNorm, qkv: Tensor, attention: Attention, output: Tensor, feed_forward: FewFeedForward
    ) -> None:
        """Take the parts; `make_few` says whether they fit."""
        self._norm = (norm.weight.tensor, norm.eps)
        self._qkv = qkv
        self._attention = attention
        self._output = output
        self._feed_forward = feed_forward

    def __call__(self, residual: Tensor, angles: Angles, context: ForwardContext) -> None:
        """Run the layer on the (num_tokens, hidden_size) residual stream, in place."""
        from services.scheduler.engine.kernels.few_linear import few_linear  # Triton only where it is used

        qkv = few_linear(residual, self._qkv, norm=self._norm)
        few_linear(self._attention(qkv, angles, context), self._output, add_to=residual)
        self._feed_forward(residual, context)


class FewMLP:
    """Gate, up and down of a dense layer."""

    def __init__(self, norm: RMSNorm, gate_up: Tensor, down: Tensor) -> None:
        """Take the parts; `make_few_mlp` says whether they fit."""
        self._norm = (norm.weight.tensor, norm.eps)
        self._gate_up = gate_up
        self._down = down

    def __call__(self, residual: Tensor, context: ForwardContext) -> None:
        """See `FewFeedForward`."""
        from services.scheduler.engine.kernels.few_linear import few_linear  # Triton only where it is used

        inner = few_linear(residual, self._gate_up, norm=self._norm, gated=True)
        few_linear(inner, self._down, add_to=residual)


def make_few(
    norm: RMSNorm, qkv: Linear, attention: Attention, output: Linear, feed_forward: FewFeedForward | None
) -> FewLayer | None:
    """Make the form for few tokens, where the layer's weights allow it and its feed-forward part has one."""
    found = _plain(qkv, output)
    if feed_forward is None or found is None or qkv.in_features > _MAX_HIDDEN:
        return None
    return FewLayer(norm, found[0], attention, found[1], feed_forward)


def make_few_mlp(norm: RMSNorm, gate_up: Linear, down: Linear) -> FewMLP | None:
    """Make that form of a dense feed-forward part, where its weights allow it."""
    found = _plain(gate_up, down)
    return None if found is None else FewMLP(norm, *found)


def _plain(*layers: Linear) -> list[Tensor] | None:
    """The plain weights of some layers; None if the kernel multiplies by any of them not."""
    weights = [layer.plain for layer in layers]
    found = [weight for weight in weights if weight is not None]
    if len(found) < len(weights):
        return None
    from services.scheduler.engine.kernels.few_linear import fits  # Triton only where it is used

    return found if all(weight.dtype.itemsize == 2 and fits(*weight.shape) for weight in found) else None
