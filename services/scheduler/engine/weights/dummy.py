"""Random weights in place of a checkpoint, for benchmarks: the same on every machine with, and without, a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups
from services.scheduler.engine.layers.weight import Share, Source

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

    def read(self, share: Share | None = None) -> Tensor:
        """Draw it; of a piece, all of it, so that the ranks have pieces of one tensor."""
        whole = self._draw()
        return whole if share is None else share.of(whole)

    def _draw(self) -> Tensor:
        if self.name.endswith(".bias"):
            return torch.zeros(self.shape)
        if len(self.shape) == 1:
            return torch.ones(self.shape)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(self.seed)
        return torch.randn(self.shape, generator=generator, device=device).mul_(_STD)

    def read_int4(self, share: Share | None = None) -> Int4Groups | None:
        """Dummies have full precision."""
        return None
