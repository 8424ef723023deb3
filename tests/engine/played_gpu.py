"""The GPU engine where there is no GPU: kernels in Triton's interpreter, graphs played by the calls they would record.

Ranks have gloo in the place of NCCL, and a file that both map in the place of each other's memory.

To be imported in a process of its own that has TRITON_INTERPRET=1 from its start. Run as a module it is a rank above 0,
as `follower` is: `use_followers` has rank 0 start it.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from services.scheduler.core.ports import EngineLimits
from services.scheduler.engine import gpu_forward, staging
from services.scheduler.engine.gpu import GpuEngine
from services.scheduler.engine.gpu_follower import GpuFollower
from services.scheduler.engine.gpu_rank import GpuRank
from services.scheduler.engine.graph import StepGraphs
from services.scheduler.engine.kernels import all_reduce, sum_norm
from services.scheduler.engine.kvcache import KVCache
from services.scheduler.engine.models.config import read_config
from services.scheduler.engine.models.registry import model_class
from services.scheduler.engine.parallel import device_comm, group
from services.scheduler.engine.parallel.comm import SOLO, Comm, GroupComm, join_store, open_store
from services.scheduler.engine.parallel.control import Channel, Closed, Serve, Setup
from services.scheduler.engine.parallel.device_comm import DeviceComm
from services.scheduler.engine.parallel.orders import Order
from services.scheduler.engine.parallel.peers import PeerMemory
from services.scheduler.engine.parallel.state import Ranks
from services.scheduler.engine.weights.loader import load_weights
from shared.model_files import locate
from tests.engine.no_streams import NoStreams

FOLLOWER = __name__
SIZES = [1, 4, 8]
MAX_CHANGES = 2
"""Of several ranks, so that changes of pages go ahead of their step."""
LIMITS = EngineLimits(
    "x", vocab_size=0, eos_token_ids=frozenset(), max_seq_len=512, page_size=16, num_pages=64, max_running=8,
    max_step_tokens=256,
)  # fmt: skip
DTYPE = torch.float32
CPU = torch.device("cpu")


def _open_file(num_bytes: int, ranks: Ranks, store: Any, device: torch.device) -> PeerMemory:
    """Memory that all ranks can write to, as `peers.open_peers` gives it."""
    path = Path(tempfile.gettempdir()) / f"millrace-peers-{store.port}-{ranks.rank}"
    path.write_bytes(b"")
    os.truncate(path, num_bytes)
    store.set(f"file-{ranks.rank}", str(path))
    paths = [store.get(f"file-{rank}").decode() for rank in range(ranks.size)]
    _maps.extend(np.memmap(each, np.int64, "r+") for each in paths)
    store.set(f"mapped-{ranks.rank}", "1")
    store.wait([f"mapped-{rank}" for rank in range(ranks.size)])
    path.unlink()
    memory = PeerMemory(ranks, store, device)
    memory.addresses = [each.ctypes.data for each in _maps]
    return memory


_maps: list[np.memmap] = []


def _make_gloo(store: Any, rank: int, size: int, options: Any) -> Any:
    return GroupComm(Ranks(rank, size), store, CPU)._group


class _WithoutNccl:
    """`distributed_c10d` as `device_comm` needs it."""

    AllreduceOptions = distributed_c10d.AllreduceOptions
    AllgatherOptions = distributed_c10d.AllgatherOptions
    BroadcastOptions = distributed_c10d.BroadcastOptions
    ReduceOp = distributed_c10d.ReduceOp

    class ProcessGroupNCCL:
        Options = dict

        def __new__(cls, *args: Any) -> Any:
            return _make_gloo(*args)


device_comm.open_peers = _open_file
device_comm._c10d = _WithoutNccl
all_reduce.CHANNELS = sum_norm.SMALL_ROWS = 8  # fewer programs, which run one after the other
device_comm._PROBED_BYTES = (4, 36_864)


class Played:
    """A graph that computes again what it was captured from, and puts the result in the same place."""

    def __init__(self, compute: Callable[[int], Tensor], size: int) -> None:
        self.compute, self.size, self.times, self.result = compute, size, 0, compute(size).clone()

    def replay(self) -> None:
        self.times += 1
        self.result.copy_(self.compute(self.size))


def _play(self: StepGraphs, size: int) -> tuple[Played, Tensor]:
    played = Played(self._compute, size)
    return played, played.result


StepGraphs._capture = _play  # type: ignore[method-assign, assignment]
gpu_forward.mixed_sizes = lambda most: [32, 64]


def make_rank(model_path: str, comm: Comm = SOLO, *, replayed: bool = False) -> GpuRank:
    """Load a model, or a piece of it, and make what a GPU does with it."""
    files = locate(model_path)
    config = read_config(files.config)
    limits = replace(LIMITS, vocab_size=config.vocab_size, eos_token_ids=frozenset(files.eos_token_ids))
    own = config.share(comm.ranks)
    with torch.inference_mode():
        model = model_class(config.architecture)(own, limits.max_seq_len, DTYPE, CPU, comm)
        load_weights(model, files, "auto")
    cache = KVCache.for_model(own, limits.num_pages, limits.page_size, DTYPE, CPU)
    rank = GpuRank(model, cache, limits, NoStreams(), comm)
    if replayed:
        rank.capture(SIZES, mixed=True)
    return rank


def make_engine(model_path: str, ranks: int, *, replayed: bool = False, direct: bool = False) -> GpuEngine:
    """Make an engine of one rank, or of several, which may add up in each other's memory."""
    if ranks == 1:
        return GpuEngine(make_rank(model_path, replayed=replayed))
    group.FOLLOWER = FOLLOWER  # type: ignore[misc]
    staging.MAX_CHANGES = MAX_CHANGES  # type: ignore[misc]
    store = open_store(ranks)
    followers = group.Followers(ranks, store.port, model_path, {"replayed": replayed, "direct": direct})
    comm = DeviceComm(Ranks(0, ranks), store, CPU, direct=direct)
    assert comm.is_direct is direct
    engine = GpuEngine(make_rank(model_path, comm, replayed=replayed), followers)
    followers.watch(engine.lose)
    return engine


def prompt(length: int) -> list[int]:
    """Some ids."""
    return [int(i) for i in np.random.default_rng(length).integers(3, 320, length)]


def follow(fd: int, on_serve: Callable[[], object] = lambda: None, on_end: Callable[[], object] = lambda: None) -> None:
    """Be a rank above 0."""
    staging.MAX_CHANGES = MAX_CHANGES  # type: ignore[misc]
    channel = Channel(socket.socket(fileno=fd))
    setup = channel.receive()
    assert isinstance(setup, Setup)
    store = join_store(setup.port, setup.size)
    comm = DeviceComm(Ranks(setup.rank, setup.size), store, CPU, direct=setup.config["direct"])
    follower = GpuFollower(make_rank(str(Path(setup.model)), comm, replayed=setup.config["replayed"]))
    try:
        while True:
            order = channel.receive()
            if isinstance(order, Serve):
                on_serve()
                continue
            assert isinstance(order, Order)
            follower.follow(order)
    except Closed:
        on_end()
        os._exit(0)


if __name__ == "__main__":
    follow(int(sys.argv[1]))
