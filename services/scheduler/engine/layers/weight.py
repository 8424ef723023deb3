"""A layer's tensor while its checkpoint is read: which pieces it is made of, and what may fill them."""

from typing import Protocol

import torch
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups


class Source(Protocol):
    """One tensor of a checkpoint, not yet read."""

    @property
    def name(self) -> str:
        """Its name, as the models know it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    def read(self) -> Tensor:
        """Read it, in any floating dtype."""
        ...

    def read_int4(self) -> Int4Groups | None:
        """Read it as the 4-bit groups that it is stored in, or None when it is not."""
        ...


class Fillable(Protocol):
    """Whatever a checkpoint's tensor can be put into."""

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The shape that the part of that number must have."""
        ...

    def fill(self, source: Source, part: int) -> None:
        """Take a tensor of that shape as the part of that number."""
        ...


class Weight:
    """A tensor that is stacked from one or more tensors of the checkpoint along its first dimension."""

    def __init__(self, parts: tuple[int, ...], rest: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the memory.

        Args:
            parts: rows of each tensor it is made of.
            rest: the other dimensions.
            dtype: what the values are converted to.
            device: where it lies.
        """
        self.parts = parts
        self.rest = rest
        self.tensor = torch.empty((sum(parts), *rest), dtype=dtype, device=device)

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The shape of one part."""
        return (self.parts[part], *self.rest)

    def fill(self, source: Source, part: int) -> None:
        """Copy a tensor into its rows; its shape has been checked."""
        first = sum(self.parts[:part])
        self.tensor[first : first + self.parts[part]].copy_(source.read())
