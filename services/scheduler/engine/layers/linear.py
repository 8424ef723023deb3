"""Linear layers, merged where a model multiplies the same input by several weights."""

import torch
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups, Product, pack
from services.scheduler.engine.layers.weight import Source, Weight


class Linear:
    """y = x W^T + b, with W and b stacked from one or more tensors of the checkpoint.

    Once every part is filled the weight is laid out for the device and its plain form is dropped, so that a
    model is never in memory twice.

    Attributes:
        weight: fill with part numbers 0 .. len(parts) - 1.
        bias: likewise, or None.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Lay out the layer.

        Args:
            in_features: size of the input.
            parts: outputs of each weight in it.
            bias: whether each has a bias.
            dtype: precision of weights and products.
            device: where they lie.
        """
        self.parts = parts
        self.in_features = in_features
        self._dtype = dtype
        self._device = device
        self._weight: Weight | None = None
        self._int4: dict[int, Int4Groups] = {}
        self._missing = len(parts) * (2 if bias else 1)
        self._product: Product | None = None
        self.weight = _WeightSlot(self)
        self.bias = _BiasSlot(self, Weight(parts, (), dtype, device)) if bias else None

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, sum of parts); the first tokens are those of decode rows."""
        assert self._product is not None, "called before its weights were loaded"
        return self._product(x, num_decode)

    def fill_weight(self, source: Source, part: int) -> None:
        """Take one weight."""
        if self._weight is None:
            self._weight = Weight(self.parts, (self.in_features,), self._dtype, self._device)
        self._weight.fill(source, part)
        if self._dtype == torch.bfloat16 and (groups := source.read_int4()) is not None:
            self._int4[part] = groups
        self.count_part()

    def count_part(self) -> None:
        """Note that a part is there; with the last one the layer becomes usable."""
        self._missing -= 1
        if self._missing:
            return
        assert self._weight is not None
        bias = self.bias.weight.tensor if self.bias is not None else None
        self._product = pack(self._weight.tensor, bias, _merge(self._int4, len(self.parts)))
        self._weight = None
        self._int4 = {}


class _WeightSlot:
    def __init__(self, owner: Linear) -> None:
        self._owner = owner

    def part_shape(self, part: int) -> tuple[int, ...]:
        return (self._owner.parts[part], self._owner.in_features)

    def fill(self, source: Source, part: int) -> None:
        self._owner.fill_weight(source, part)


class _BiasSlot:
    def __init__(self, owner: Linear, weight: Weight) -> None:
        self._owner = owner
        self.weight = weight

    def part_shape(self, part: int) -> tuple[int, ...]:
        return self.weight.part_shape(part)

    def fill(self, source: Source, part: int) -> None:
        self.weight.fill(source, part)
        self._owner.count_part()


def _merge(by_part: dict[int, Int4Groups], num_parts: int) -> Int4Groups | None:
    """Stack the 4-bit forms; None unless every part has one."""
    if len(by_part) != num_parts:
        return None
    groups = [by_part[part] for part in range(num_parts)]
    return Int4Groups(
        torch.cat([g.q for g in groups]), torch.cat([g.scale for g in groups]), torch.cat([g.zero for g in groups])
    )
