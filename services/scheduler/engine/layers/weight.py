"""A layer's tensor while its checkpoint is read: which pieces it is made of, and what may fill them."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups
from services.scheduler.engine.parallel.state import Ranks


@dataclass(frozen=True, slots=True)
class Share:
    """A piece of a tensor: places `start` to `stop` of dimension `dim`."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Give that piece of a whole tensor, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


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

    def read(self, share: Share | None = None) -> Tensor:
        """Read it, or a piece of it, in any floating dtype."""
        ...

    def read_int4(self, share: Share | None = None) -> Int4Groups | None:
        """Read it as the 4-bit groups that it is stored in, or None when it (or that piece of it) is not."""
        ...


class Fillable(Protocol):
    """Whatever a checkpoint's tensor can be put into."""

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The shape that the part of that number must have."""
        ...

    def fill(self, source: Source, part: int) -> None:
        """Take a tensor of that shape as the part of that number."""
        ...


@dataclass(frozen=True, slots=True)
class Split:
    """How ranks share a tensor.

    Attributes:
        dim: the dimension along which each rank has a piece.
        ranks: who this is.
        full: size of that dimension in the checkpoint, when the pieces do not fill it evenly; what the last piece
            lacks is zero. None: every part is divided evenly.
    """

    dim: int
    ranks: Ranks
    full: int | None = None

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of what has this shape here."""
        size = self.full if self.full is not None else shape[self.dim] * self.ranks.size
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])

    def share(self, shape: tuple[int, ...]) -> Share | None:
        """The piece that this rank has, given its shape here; None when all of it."""
        if self.ranks.size == 1:
            return None
        size = shape[self.dim]
        start = self.ranks.rank * size
        whole = self.whole(shape)[self.dim]
        return Share(self.dim, min(start, whole), min(start + size, whole))


class Weight:
    """A tensor that is stacked from one or more tensors of the checkpoint along its first dimension."""

    def __init__(
        self,
        parts: tuple[int, ...],
        rest: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        split: Split | None = None,
        memory: Tensor | None = None,
    ) -> None:
        """Reserve the memory.

        Args:
            parts: rows of each tensor it is made of, as this rank has them.
            rest: the other dimensions.
            dtype: what the values are converted to.
            device: where it lies.
            split: how ranks share it; None when each has all of it.
            memory: where it is to lie; None reserves it.
        """
        self.parts = parts
        self.rest = rest
        self.split = split
        self.tensor = torch.empty((sum(parts), *rest), dtype=dtype, device=device) if memory is None else memory

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The shape of one part in the checkpoint."""
        shape = (self.parts[part], *self.rest)
        return shape if self.split is None else self.split.whole(shape)

    def share(self, part: int) -> Share | None:
        """The piece of a part that this rank has; None when all of it."""
        return None if self.split is None else self.split.share((self.parts[part], *self.rest))

    def fill(self, source: Source, part: int) -> None:
        """Copy a tensor into its rows; its shape has been checked."""
        first = sum(self.parts[:part])
        rows = self.tensor[first : first + self.parts[part]]
        found = source.read(self.share(part))
        rows[: len(found)].copy_(found)
        rows[len(found) :].zero_()
