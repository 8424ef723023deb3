"""Random weights in place of a checkpoint, for benchmarks: the same on every machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups
from services.scheduler.engine.layers.weight import Source

_STD: Final = 0.02


def dummy_sources(shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Source]:
    """Invent tensors: matrices are normal with a deviation of 0.02, norms are ones, biases are zeros."""
    return {name: DummySource(name, shape, seed) for seed, (name, shape) in enumerate(sorted(shapes.items()))}


@dataclass(frozen=True, slots=True)
class DummySource:
    """One invented tensor."""

    name: str
    shape: tuple[int, ...]
    seed: int

    def read(self) -> Tensor:
        """Draw it."""
        if self.name.endswith(".bias"):
            return torch.zeros(self.shape)
        if len(self.shape) == 1:
            return torch.ones(self.shape)
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed)) * _STD

    def read_int4(self) -> Int4Groups | None:
        """Dummies have full precision."""
        return None
