"""Linear layers, merged where a model multiplies the same input by several weights.

Ranks that share a model share each of these layers: by its outputs, when what follows works on a piece of them, or
by its inputs, when they come in pieces; then what comes out is this rank's part of a sum, for a norm's `add`.
"""

from enum import IntEnum

import torch
from torch import Tensor

from services.scheduler.engine.kernels.packed_linear import Int4Groups, Product, pack
from services.scheduler.engine.layers.weight import Source, Split, Weight
from services.scheduler.engine.parallel.comm import SOLO, Comm


class By(IntEnum):
    """What of a layer the ranks share; the value is the dimension of its weight."""

    OUTPUTS = 0
    INPUTS = 1


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
        by: By | None = None,
        comm: Comm = SOLO,
    ) -> None:
        """Lay out the layer.

        Args:
            in_features: size of the input, as this rank has it.
            parts: outputs of each weight in it, as this rank has them.
            bias: whether each has a bias.
            dtype: precision of weights and products.
            device: where they lie.
            by: what the ranks share; None when each has all of it.
            comm: the ranks.
        """
        self._split = None if by is None else Split(int(by), comm.ranks)
        self.parts = parts
        self.in_features = in_features
        self._dtype = dtype
        self._device = device
        self._weight: Weight | None = None
        self._int4: dict[int, Int4Groups] = {}
        self._missing = len(parts) * (2 if bias else 1)
        self._product: Product | None = None
        self._plain: Tensor | None = None
        self._shared = comm.ranks.size > 1
        self.weight = _WeightSlot(self)
        self.bias: _BiasSlot | None = None
        if bias:
            share = self._split if by is By.OUTPUTS else None
            self.bias = _BiasSlot(
                self, Weight(parts, (), dtype, device, share), leave=by is By.INPUTS and comm.ranks.rank > 0
            )

    def __call__(self, x: Tensor, num_decode: int) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, sum of parts); the first tokens are those of decode rows.

        Shared by its inputs, it gives this rank's part of a sum, which the `add` of a norm makes.
        """
        assert self._product is not None, "called before its weights were loaded"
        return self._product(x, num_decode)

    @property
    def plain(self) -> Tensor | None:
        """(sum of parts, in_features) the whole layer as one weight on a GPU, where that is all there is to it."""
        return self._plain

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The shape of one weight in the checkpoint."""
        shape = (self.parts[part], self.in_features)
        return shape if self._split is None else self._split.whole(shape)

    def new_weight(self) -> Weight:
        """Reserve the plain form of the weight."""
        return Weight(self.parts, (self.in_features,), self._dtype, self._device, self._split)

    def fill_weight(self, source: Source, part: int) -> None:
        """Take one weight."""
        if self._weight is None:
            self._weight = self.new_weight()
        self._weight.fill(source, part)
        if self._dtype == torch.bfloat16 and (groups := source.read_int4(self._weight.share(part))) is not None:
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
        if self._device.type == "cuda" and bias is None and not self._shared:
            self._plain = self._weight.tensor
        self._weight = None
        self._int4 = {}


class _WeightSlot:
    def __init__(self, owner: Linear) -> None:
        self._owner = owner

    def part_shape(self, part: int) -> tuple[int, ...]:
        return self._owner.part_shape(part)

    def fill(self, source: Source, part: int) -> None:
        self._owner.fill_weight(source, part)


class _BiasSlot:
    """The bias.

    Args:
        leave: another rank adds it to the sum.
    """

    def __init__(self, owner: Linear, weight: Weight, *, leave: bool) -> None:
        self._owner = owner
        self._leave = leave
        self.weight = weight

    def part_shape(self, part: int) -> tuple[int, ...]:
        return self.weight.part_shape(part)

    def fill(self, source: Source, part: int) -> None:
        self.weight.fill(source, part)
        if self._leave:
            self.weight.tensor.zero_()
        self._owner.count_part()


def _merge(by_part: dict[int, Int4Groups], num_parts: int) -> Int4Groups | None:
    """Stack the 4-bit forms; None unless every part has one."""
    if len(by_part) != num_parts:
        return None
    groups = [by_part[part] for part in range(num_parts)]
    return Int4Groups(
        torch.cat([g.q for g in groups]), torch.cat([g.scale for g in groups]), torch.cat([g.zero for g in groups])
    )
