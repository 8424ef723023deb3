"""Bodies of tests that need processes of their own: `python -m tests.gpu.two_gpus FUNCTION ARGUMENTS`."""

import os
import signal
import sys
from collections.abc import Callable

import numpy as np
import psutil
import torch

from services.scheduler.core.ports import EngineFault
from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.parallel.comm import join_store
from services.scheduler.engine.parallel.device_comm import DeviceComm
from services.scheduler.engine.parallel.state import Ranks
from shared.errors import ConfigError
from shared.model_files import locate
from shared.sampling import SamplingParams
from tests.engine.driver import Driver

FAULT = 3
"""Exit status of an engine that has told its caller of the lost rank, before the process ends as it must."""
REFUSED = 2
"""Of every process that cannot serve as set, whoever of the ranks found it."""


def sums(rank: int, port: int) -> None:
    """Sums of every size and dtype against float32, alone and replayed; all ranks have the same to the last bit."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    comm = DeviceComm(Ranks(rank, 2), join_store(port, 2), device)
    assert comm.is_direct, "the GPUs cannot reach each other's memory"

    def numbers(of: int, seed: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(7 * seed + of)).to(device, dtype)

    sizes = [2, 8, 5120, 5122, 16 * 5120, 131_072, 262_144, 262_146, 256 * 5120, 2**20]
    for seed, (dtype, size) in enumerate((d, s) for d in (torch.bfloat16, torch.float16, torch.float32) for s in sizes):
        each = [numbers(of, seed, size, dtype) for of in range(2)]
        wanted = (each[0].float() + each[1].float()).to(dtype)
        assert torch.equal(comm.all_reduce(each[rank].clone()), wanted), (dtype, size)
        pieces = comm.gather(each[rank])
        assert torch.equal(pieces, torch.stack(each)), (dtype, size)
    _sums_with_norms(comm, numbers)
    _sums_of_graphs(comm, numbers)
    comm.close()


def _sums_with_norms(comm: DeviceComm, numbers: Callable[..., torch.Tensor]) -> None:
    """In one kernel as in two, to the last bit of the stream."""
    for seed, (count, size) in enumerate(((1, 5120), (4, 1024), (128, 5120), (129, 5120), (256, 5120), (300, 4096))):
        each = [numbers(of, 100 + seed, count * size, torch.bfloat16).view(count, size) for of in range(2)]
        residual = numbers(2, 100 + seed, count * size, torch.bfloat16).view(count, size)
        weight = numbers(3, 100 + seed, size, torch.bfloat16)
        stream = residual + (each[0].float() + each[1].float()).bfloat16()
        found = comm.sum_norm(each[comm.ranks.rank], residual, weight, 1e-6)
        assert found is not None and torch.equal(residual, stream), (count, size)
        wanted = torch.nn.functional.rms_norm(stream.float(), (size,), weight.float(), 1e-6)
        assert float((found.float() - wanted).norm() / wanted.norm()) < 1e-2, (count, size)
        assert torch.equal(*comm.gather(found)), (count, size)


def _sums_of_graphs(comm: DeviceComm, numbers: Callable[..., torch.Tensor]) -> None:
    """Sums of two kinds and NCCL in one graph, replayed many times with other numbers, as fast as the GPUs go."""
    rows = [numbers(comm.ranks.rank, 1, 5120 * count, torch.float32) for count in (1, 64, 200, 300)]
    steps = torch.zeros(1, device=rows[0].device)

    def compute() -> list[torch.Tensor]:
        steps.add_(1.0)
        return [comm.all_reduce(comm.all_reduce(row * steps) * 0.5) for row in rows]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = compute()
        for _ in range(500):
            graph.replay()
        stream.synchronize()
    for count, row in zip((1, 64, 200, 300), found, strict=True):
        each = [numbers(of, 1, 5120 * count, torch.float32) * steps for of in range(2)]
        assert torch.equal(row, each[0] + each[1]), count
    del graph


def lost(model: str) -> None:
    """Kill rank 1 while steps are under way, and exit with FAULT when the engine says so."""
    config = EngineConfig(device="cuda", load_format="dummy", max_running=24, max_seq_len=2048, num_pages=200, ranks=2)
    driver = Driver(build_engine(config, locate(model)))
    seqs = [driver.add(list(np.arange(3, 40 + n)), SamplingParams(temperature=1.0, seed=n)) for n in range(8)]
    driver.prefill(seqs)
    follower = next(p for p in psutil.Process().children() if "services.scheduler.engine.follower" in p.cmdline())
    ahead = driver.launch([(seq, 1) for seq in seqs])
    os.kill(follower.pid, signal.SIGKILL)
    try:
        while True:
            launched = driver.launch([(seq, 1) for seq in seqs])
            driver.settle(ahead)
            ahead = launched
    except EngineFault as e:
        print(f"told: {e}", flush=True)
        driver.engine.close()
        sys.exit(FAULT)


def cramped(rank: int, model: str) -> None:
    """Leave no room for the pool on one of the GPUs, and exit with REFUSED when the engine says so."""
    free, total = torch.cuda.mem_get_info(rank)
    # A tenth stays free of weights and pool; what a start takes before it looks for the pool is far less than this.
    held = torch.empty(free - total // 20, dtype=torch.uint8, device=f"cuda:{rank}")
    config = EngineConfig(device="cuda", load_format="dummy", max_running=24, max_seq_len=2048, ranks=2)
    try:
        build_engine(config, locate(model))
    except ConfigError as e:
        print(f"told: {e}", flush=True)
        sys.exit(REFUSED)
    raise AssertionError(f"there was room beside {held.nbytes} bytes")


if __name__ == "__main__":
    name, *args = sys.argv[1:]
    if name == "sums":
        with torch.inference_mode():
            sums(int(args[0]), int(args[1]))
    elif name == "cramped":
        cramped(int(args[0]), args[1])
    else:
        lost(args[0])
