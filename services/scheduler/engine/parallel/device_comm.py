"""What the ranks of a model say to each other on GPUs: all of it goes into the current stream, and no host waits.

Owns the NCCL group, and the memory for the small sums that go around it where the GPUs can reach each other. Every
call but `least` may be captured in a graph, once it has been made without one.
"""

import logging
import os
import time
from typing import Any, Final, cast

import torch
import torch.distributed.distributed_c10d
from torch import Tensor

from services.scheduler.engine.kernels import all_reduce as quick
from services.scheduler.engine.kernels import sum_norm as rows
from services.scheduler.engine.kernels.all_reduce import PeerPlaces
from services.scheduler.engine.parallel.ending import EXIT_CONFIG, leave_device
from services.scheduler.engine.parallel.peers import PeersUnreachable, open_peers
from services.scheduler.engine.parallel.state import Ranks
from services.scheduler.engine.stream import Mark, new_event
from shared.errors import ConfigError

log = logging.getLogger(__name__)

_c10d: Final[Any] = torch.distributed.distributed_c10d  # its stubs leave out what is used here
_PROBED_BYTES: Final = (4, 10_240, 655_360, 4 * quick.CHANNELS * quick.LARGE_WORDS)
"""Sums of both kinds, in one channel and in all."""
_PROBE_S: Final = 20.0
"""How long the sums that are tried out may take together; they take milliseconds, and nothing is compiled meanwhile."""


class DeviceComm:
    """Of one rank among several, each with a GPU of its own; a `Comm`."""

    def __init__(self, ranks: Ranks, store: Any, device: torch.device, *, direct: bool = True) -> None:
        """Meet the other ranks.

        Args:
            ranks: who this is.
            store: from `open_store` or `join_store`.
            device: this rank's.
            direct: whether small sums may go by the GPUs' own memory.
        """
        # NVLink's multicast gains nothing at these sizes, and where GPUs are lent out it can upset the whole host.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        self.ranks = ranks
        self._device = device
        self._store = store  # it must outlive the group
        self._group = _c10d.ProcessGroupNCCL(store, ranks.rank, ranks.size, _c10d.ProcessGroupNCCL.Options())
        self._places: PeerPlaces | None = None
        with torch.inference_mode():
            self.least(0)  # the group connects at its first call
            if direct:
                self._open_places()

    @property
    def is_direct(self) -> bool:
        """Whether small sums go by the GPUs' own memory."""
        return self._places is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        x = x.contiguous()
        if self._places is not None and quick.fits(x, self.ranks.size):
            return quick.all_reduce(x, self._places)
        return self.ring_all_reduce(x)

    def ring_all_reduce(self, x: Tensor) -> Tensor:
        """The same through NCCL whatever the size; x must be contiguous and is changed."""
        if not x.numel():  # no row of the step is wanted
            return x
        self._finish(self._group.allreduce([x], _on_this_stream(_c10d.AllreduceOptions())))
        return x

    def sum_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """See `Comm`."""
        if self._places is None or not x.is_contiguous() or not residual.is_contiguous():
            return None
        if not rows.fits(x, self.ranks.size):
            return None
        return rows.sum_norm(x, residual, weight, eps, self._places)

    def gather(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        x = x.contiguous()
        if self._places is not None and quick.fits_gather(x):
            return quick.all_gather(x, self._places)
        out = torch.empty((self.ranks.size, *x.shape), dtype=x.dtype, device=x.device)
        options = _on_this_stream(_c10d.AllgatherOptions())
        self._finish(self._group._allgather_base(out.view(-1), x.view(-1), options))
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        return self.gather(x).movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> Tensor:
        """See `Comm`."""
        options = _on_this_stream(_c10d.BroadcastOptions())
        options.rootRank, options.rootTensor = 0, 0
        self._finish(self._group.broadcast([x], options))
        return x

    def least(self, value: int) -> int:
        """See `Comm`; this one waits."""
        own = torch.tensor([-value], dtype=torch.int64, device=self._device)
        options = _on_this_stream(_c10d.AllreduceOptions())
        options.reduceOp = _c10d.ReduceOp.MAX
        self._finish(self._group.allreduce([own], options))
        return -int(own)

    def close(self) -> None:
        """Leave the group. Nothing may be under way."""
        self._group.abort()

    def _finish(self, work: Any) -> None:
        """Let the current stream wait, where this torch has used another one after all."""
        if work is not None:
            work.wait()

    def _open_places(self) -> None:
        """Open the ranks' memory to each other and see that it works."""
        rank, size = self.ranks.rank, self.ranks.size
        try:
            memory = open_peers(8 * quick.num_words(size), self.ranks, self._store, self._device)
        except PeersUnreachable as e:
            log.warning("small sums go through NCCL: GPUs cannot reach each other's memory (%s)", e)
            return
        calls = torch.zeros((2, quick.CHANNELS), dtype=torch.int32, device=self._device)
        places = PeerPlaces(torch.tensor(memory.addresses, dtype=torch.int64, device=self._device), calls, rank, size)
        self._rehearse()
        self.least(0)  # nobody compiles any more
        if self.least(int(self._is_right(places))):
            self._places = places
            log.info("small sums go by the GPUs' own memory")
        else:
            memory.give_back()
            log.warning("small sums go through NCCL: those by the GPUs' own memory came out wrong")

    def _rehearse(self) -> None:
        """Compute the sums that are tried out with nobody, so that all that they take is compiled and loaded.

        A kernel that waits for another rank may hold up what this one would still load for it.
        """
        rank, size = self.ranks.rank, self.ranks.size
        words = torch.full((quick.num_words(size),), quick.ARRIVED, dtype=torch.int64, device=self._device)
        addresses = torch.full((size,), words.data_ptr(), dtype=torch.int64, device=self._device)
        for num_bytes in _PROBED_BYTES:
            calls = torch.zeros((2, quick.CHANNELS), dtype=torch.int32, device=self._device)
            bool(self._try_out(num_bytes, PeerPlaces(addresses, calls, rank, size)))

    def _is_right(self, places: PeerPlaces) -> bool:
        """Try sums out.

        Raises:
            ConfigError: a GPU never gets an answer; nothing can be asked of it any more.
        """
        all_right = torch.stack([self._try_out(num_bytes, places) for num_bytes in _PROBED_BYTES * 3]).all()
        if all_right.is_cuda:
            event = new_event()
            event.record()
            done = cast(Mark, event)
            until = time.monotonic() + _PROBE_S
            while not done.query():
                if time.monotonic() > until:
                    error = ConfigError("a GPU's memory took no sums from another GPU; set disable_custom_all_reduce")
                    leave_device(EXIT_CONFIG, self, places, all_right, error)
                    raise error
                time.sleep(0.001)
        return bool(all_right)

    def _try_out(self, num_bytes: int, places: PeerPlaces) -> Tensor:
        """Launch a sum; returns whether it is right."""
        size = places.ranks
        x = torch.arange(num_bytes // 4, dtype=torch.float32, device=self._device)
        found = quick.all_reduce(x + places.rank, places)
        return (found == x * size + size * (size - 1) // 2).all()


def _on_this_stream(options: Any) -> Any:
    """Have a call of the group use the current stream, where this torch can; else `_finish` joins the two."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options
