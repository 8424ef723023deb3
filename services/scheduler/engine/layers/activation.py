"""The activations between the two halves of an MLP."""

from collections.abc import Callable
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from shared.errors import ConfigError

Activation = Callable[[Tensor], Tensor]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of (num_tokens, 2 * size) with the gate first."""
    if gate_up.is_cuda:
        from services.scheduler.engine.kernels.elementwise import silu_mul  # Triton only where it is used

        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the exact form of gelu."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate).mul_(up)


_BY_NAME: Final[dict[str, Activation]] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}


def activation(name: str) -> Activation:
    """Find the gated form of an activation by the name that checkpoints use.

    Raises:
        ConfigError: the name is not known.
    """
    if name not in _BY_NAME:
        raise ConfigError(f"activation {name!r} is not supported; supported: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
