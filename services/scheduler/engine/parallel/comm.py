"""What the ranks of a model say to each other while they compute: sums, and pieces put together.

Owns the process group. It is made directly and not the global one of `torch.distributed`, so that a process may
hold several engines. Ranks on CPUs speak gloo; those on GPUs have `device_comm`, whose calls are the same.
"""

from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed
from torch import Tensor

from services.scheduler.engine.parallel.state import SOLO_RANK, Ranks

HOST: Final = "127.0.0.1"
_c10d: Final[Any] = torch.distributed  # its stubs leave out what is used here
_JOIN_TIMEOUT: Final = timedelta(seconds=300)
"""Ranks load their weights at their own pace before they first wait for each other."""


class Comm(Protocol):
    """The calls every rank makes in the same order."""

    @property
    def ranks(self) -> Ranks:
        """Who this is."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up a tensor over the ranks; it may be changed in place."""
        ...

    def sum_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Add x up over the ranks, add that to the residual stream in place, and normalise the stream.

        Returns:
            The normalised stream; None, and nothing is done, where there is no such call of one piece.
        """
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Put the tensors of the ranks behind each other: (ranks, *shape)."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Put the pieces of the ranks together along the last dimension."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Give every rank the tensor of rank 0, in place."""
        ...

    def least(self, value: int) -> int:
        """Find the smallest of a number that each rank has."""
        ...

    def close(self) -> None:
        """Leave the others, when nothing is under way."""
        ...


class SoloComm:
    """Of a process that has a model to itself."""

    ranks = SOLO_RANK

    def all_reduce(self, x: Tensor) -> Tensor:
        """Give it back."""
        return x

    def sum_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """There is nothing to add up."""
        return None

    def gather(self, x: Tensor) -> Tensor:
        """Give it back, as the only one."""
        return x[None]

    def all_gather(self, x: Tensor) -> Tensor:
        """Give it back."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Give it back."""
        return x

    def least(self, value: int) -> int:
        """Give it back."""
        return value

    def close(self) -> None:
        """Nothing to leave."""


SOLO: Final = SoloComm()


class GroupComm:
    """Of one rank among several.

    Args:
        ranks: who this is.
        store: from `open_store` or `join_store`.
        device: where its tensors lie.
    """

    def __init__(self, ranks: Ranks, store: Any, device: torch.device) -> None:
        self.ranks = ranks
        self._device = device
        self._store = store  # it must outlive the group
        self._group = _make_group(ranks, store)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def sum_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """See `Comm`: there is none."""
        return None

    def gather(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        return torch.stack(self._pieces(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        return torch.cat(self._pieces(x), -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        self._group.broadcast([x], _from_rank_0()).wait()
        return x

    def least(self, value: int) -> int:
        """See `Comm`."""
        own = torch.tensor([-value], dtype=torch.int64, device=self._device)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MAX
        self._group.allreduce([own], options).wait()
        return -int(own)

    def close(self) -> None:
        """See `Comm`: the group ends with the object."""

    def _pieces(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(self.ranks.size)]
        self._group.allgather([pieces], [x]).wait()
        return pieces


def open_store(size: int) -> Any:
    """Make the place where ranks find each other, on a free port (`.port`); for rank 0."""
    return _c10d.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False, timeout=_JOIN_TIMEOUT)


def join_store(port: int, size: int) -> Any:
    """Find that place; for the other ranks."""
    return _c10d.TCPStore(HOST, port, size, is_master=False, wait_for_workers=False, timeout=_JOIN_TIMEOUT)


def _make_group(ranks: Ranks, store: Any) -> Any:
    options: Any = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = _JOIN_TIMEOUT
    return _c10d.ProcessGroupGloo(store, ranks.rank, ranks.size, options)


def _from_rank_0() -> Any:
    options: Any = _c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
