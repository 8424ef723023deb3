"""Sums over the ranks of a host per size, alone and with a norm behind: NCCL, and by the GPUs' own memory, in graphs.

    python -m bench.all_reduce [--ranks 2]

Starts one process per GPU. Each figure is the time of one sum in a chain of them, as a decode step has it: rows of
Qwen3-14B's hidden size in bf16, from one row to some 400.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from services.scheduler.engine.kernels.elementwise import rms_norm
from services.scheduler.engine.parallel.comm import join_store, open_store
from services.scheduler.engine.parallel.device_comm import DeviceComm
from services.scheduler.engine.parallel.state import Ranks

HIDDEN = 5120
SIZES = [2 * HIDDEN * rows for rows in (1, 2, 4, 8, 16, 32, 51, 64, 128, 256, 384)]
CHAIN = 40
REPEATS = 15
LIMIT_S = 180


def time_chain(step: Callable[[Tensor], Tensor], size: int, comm: DeviceComm) -> float:
    """Microseconds of one sum."""
    x = torch.full((size // 2,), 1e-3, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step(x.clone())
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            y = x
            for _ in range(CHAIN):
                y = step(y)
        times = []
        for _ in range(REPEATS):
            comm.least(0)  # all begin together
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * start.elapsed_time(end) / CHAIN)
    del graph
    return statistics.median(times)


class Normed:
    """A sum, the residual stream and the norm behind it."""

    def __init__(self, comm: DeviceComm, size: int, *, direct: bool) -> None:
        self._comm, self._direct = comm, direct
        self._residual = torch.zeros((size // 2 // HIDDEN, HIDDEN), dtype=torch.bfloat16, device="cuda")
        self._weight = torch.full((HIDDEN,), 0.1, dtype=torch.bfloat16, device="cuda")

    def __call__(self, x: Tensor) -> Tensor:
        """Do it once."""
        rows = x.view(-1, HIDDEN)
        if self._direct:
            found = self._comm.sum_norm(rows, self._residual, self._weight, 1e-6)
            assert found is not None
            return found
        return rms_norm(self._comm.ring_all_reduce(rows), self._weight, 1e-6, self._residual)


def measure(rank: int, ranks: int, port: int) -> None:
    """One rank; rank 0 prints."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    comm = DeviceComm(Ranks(rank, ranks), join_store(port, ranks), device)
    with torch.inference_mode():
        for size in SIZES:
            ring_us = time_chain(comm.ring_all_reduce, size, comm)
            direct_us = time_chain(comm.all_reduce, size, comm) if comm.is_direct else None
            figures = {"bytes": size, "nccl_us": round(ring_us, 1)}
            figures["nccl_and_norm_us"] = round(time_chain(Normed(comm, size, direct=False), size, comm), 1)
            if direct_us is not None:
                figures["direct_us"] = round(direct_us, 1)
                figures["direct_with_norm_us"] = round(time_chain(Normed(comm, size, direct=True), size, comm), 1)
            if rank == 0:
                print(json.dumps({"all_reduce": figures}), flush=True)
    comm.least(0)
    torch.cuda.synchronize()
    comm.close()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank is not None:
        measure(flags.rank, flags.ranks, flags.port)
        return
    if torch.cuda.device_count() < flags.ranks:
        sys.exit(f"this benchmark needs {flags.ranks} GPUs")
    store = open_store(flags.ranks)
    own = [sys.executable, "-m", "bench.all_reduce", "--ranks", str(flags.ranks), "--port", str(store.port)]
    processes = [subprocess.Popen([*own, "--rank", str(rank)]) for rank in range(flags.ranks)]
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
