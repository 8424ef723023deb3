"""The engine on a GPU, without a broker: the mixed workload, single streams, and where a step's time goes.

    python -m bench.gpu [--models Qwen3-0.6B,Qwen3-14B] [--repeats 3] [--streams 1,16] [--profile] [--json FILE]
        [--tensor-parallel 2 [--nccl]]

Runs the real scheduler and step loop on dummy weights. Measures the device's ceilings first, so that each figure
stands beside the least time that the workload could take there. Medians of the repeats; prompts differ between
repeats, so none finds another's prefix.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.loop import QuietLink
from bench.workloads import MODELS, Ceilings, Sizes, draw_lengths, floor_s, write_model
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.link import Arrival
from services.scheduler.core.ports import Engine
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.gpu import GpuEngine
from services.scheduler.engine.parallel.device_comm import DeviceComm
from services.scheduler.loop import StepLoop
from shared.messages import GenerateRequest
from shared.model_files import locate
from shared.sampling import SamplingParams

VOCAB = 151_000
STEP_TOKENS = {"Qwen3-0.6B": 8192 + 256, "Qwen3-14B": 256, "Qwen3-30B-A3B": 2048}
"""Tokens of one step. Reading a large model's weights takes as long as computing some 180 tokens (with experts, of
which a token uses few, some 1900), so prompts that fill a decode step up are almost free; the small one's steps are
long for other reasons."""


def measure_ceilings() -> Ceilings:
    """Measure a large copy and a large bf16 product."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copy_s = statistics.median(_timed(lambda: target.copy_(source)) for _ in range(7))
    product_s = statistics.median(_timed(lambda: a @ b) for _ in range(15))
    return Ceilings(2 * source.nbytes / copy_s, 2 * 8192**3 / product_s)


def _timed(body: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    body()
    start.record()
    body()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class Diary:
    """Engine steps by kind and size: how often, and how long the device took."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wait = engine.wait
        self.entries: dict[tuple[bool, int], list[float]] = {}
        engine.wait = self.wait  # type: ignore[method-assign]

    def wait(self, step: Any) -> Any:
        """Wait, and note the step."""
        result = self._wait(step)
        batch = step.batch
        key = (len(batch.input_ids) > batch.num_rows, -(-batch.num_rows // 32) * 32)
        entry = self.entries.setdefault(key, [0, 0.0, 0, 0])
        for i, value in enumerate(
            (1, result.forward_ms, len(batch.input_ids), int(batch.starts[: batch.num_decode].sum()))
        ):
            entry[i] += value
        return result

    def table(self) -> list[dict[str, Any]]:
        """One line per kind and size, and forget them."""
        lines = [
            {
                "kind": "mixed" if mixed else "decode", "rows": rows, "steps": n, "ms": round(ms / n, 2),
                "tokens": round(tokens / n), "kv_tokens": round(kv / n),
            }
            for (mixed, rows), (n, ms, tokens, kv) in sorted(self.entries.items())
        ]  # fmt: skip
        self.entries = {}
        return lines


class Stack:
    """An engine under the real scheduler and loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.link = QuietLink()
        config = SchedulerConfig(max_prefill_tokens=8192, max_gap_ratio=0)
        self.scheduler = Scheduler(engine.limits, config)
        self.loop = StepLoop(engine, self.link, self.scheduler)
        self._number = 0

    def arrival(self, prompt_len: int, max_tokens: int) -> Arrival:
        """Make a request of random ids."""
        self._number += 1
        ids = np.random.default_rng(self._number).integers(0, VOCAB, prompt_len).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.6, ignore_eos=True, seed=self._number)
        return Arrival(GenerateRequest(f"{self._number:032x}", ids, params), 1)

    def run(self, lengths: list[tuple[int, int]], streams: int | None = None) -> dict[str, float]:
        """Run requests, all at once or so many at a time; returns seconds, tokens, and what the loop spent."""
        waiting = [self.arrival(*each) for each in lengths][::-1]
        stats, ends, tokens = self.loop.stats, self.link.num_ends, self.link.num_tokens
        before = (stats.python_s, stats.launch_s, stats.wait_s, stats.forward_s, stats.steps)
        began = time.perf_counter()
        while self.link.num_ends - ends < len(lengths):
            room = (
                len(waiting)
                if streams is None
                else streams - (len(lengths) - len(waiting) - (self.link.num_ends - ends))
            )
            while waiting and room > 0:
                self.link.waiting.append(waiting.pop())
                room -= 1
            self.loop.turn()
        seconds = time.perf_counter() - began
        after = (stats.python_s, stats.launch_s, stats.wait_s, stats.forward_s, stats.steps)
        python_s, launch_s, wait_s, forward_s, steps = (b - a for a, b in zip(before, after, strict=True))
        return {
            "seconds": round(seconds, 3),
            "tok_per_s": round((self.link.num_tokens - tokens) / seconds, 1),
            "steps": steps,
            "python_ms": round(1e3 * python_s / steps, 3),
            "launch_ms": round(1e3 * launch_s / steps, 3),
            "wait_ms": round(1e3 * wait_s / steps, 3),
            "device_ms": round(1e3 * forward_s / steps, 3),
        }

    def settle(self) -> None:
        """Run what is left."""
        while self.scheduler.slots.num_free < self.scheduler.slots.num_slots or self.link.waiting:
            self.loop.turn()


def profile(stack: Stack, rows: int, context: int, steps: int = 20, *, mixed: bool = False) -> dict[str, Any]:
    """Where the device's time goes in steps of that many rows, alone or with prompts beside them."""
    arrivals = [stack.arrival(context, 2000) for _ in range(2 * rows if mixed else rows)]
    stack.link.waiting = list(arrivals)
    prefill, decode = stack.scheduler.prefill, stack.scheduler.decode
    while len(decode) < rows if mixed else stack.link.waiting or len(prefill.ready) or prefill.running:
        stack.loop.turn()
    for _ in range(10):
        stack.loop.turn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        began = time.perf_counter()
        for _ in range(steps):
            stack.loop.turn()
        torch.cuda.synchronize()
        wall_us = 1e6 * (time.perf_counter() - began) / steps
    for arrival in arrivals:
        stack.scheduler.forget(arrival.request.uid, 1)
    stack.settle()
    kernels = sorted(found.key_averages(), key=lambda each: -each.device_time_total)
    table = {
        each.key[:70]: (round(each.device_time_total / steps, 1), round(each.count / steps, 1)) for each in kernels
    }
    busy = sum(each.device_time_total for each in kernels) / steps
    return {
        "rows": rows,
        "mixed": mixed,
        "context": context,
        "wall_us": round(wall_us),
        "busy_us": round(busy),
        "kernels": dict(list(table.items())[:16]),
    }


def bench_model(name: str, ceilings: Ceilings, flags: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    folder = Path(tempfile.mkdtemp())
    began = time.perf_counter()
    config = EngineConfig(
        device="cuda",
        load_format="dummy",
        max_running=256,
        max_seq_len=4096,
        max_step_tokens=flags.step_tokens or STEP_TOKENS[name],
        ranks=flags.tensor_parallel,
        direct_sums=not flags.nccl,
    )
    engine = build_engine(config, locate(str(write_model(name, folder))))
    stack = Stack(engine)
    ready_s = time.perf_counter() - began
    lengths = draw_lengths()
    if flags.order == "longest":
        lengths.sort(key=lambda each: -each[1])
    # Each rank reads and computes its share at the same time; that they wait for each other's sums is not counted.
    floor = floor_s(Sizes.of(MODELS[name]), lengths, ceilings) / flags.tensor_parallel
    num_tokens = sum(answer for _, answer in lengths)
    stack.run([(length, 12) for length, _ in lengths])
    diary = Diary(engine)
    runs = [stack.run(lengths) for _ in range(flags.repeats)]
    diary_lines = diary.table()
    speed = statistics.median(run["tok_per_s"] for run in runs)
    figures: dict[str, Any] = {
        "model": name,
        "tensor_parallel": flags.tensor_parallel,
        "ready_s": round(ready_s, 1),
        "kv_tokens": engine.limits.num_pages * engine.limits.page_size,
        "offline_tok_per_s": speed,
        "floor_tok_per_s": round(num_tokens / floor),
        "of_floor": round(speed * floor / num_tokens, 3),
        "runs": runs,
        "steps": diary_lines,
    }
    if isinstance(engine, GpuEngine) and isinstance(engine.comm, DeviceComm):
        figures["direct_sums"] = engine.comm.is_direct
    print(json.dumps(figures), flush=True)
    for streams in flags.streams:
        found = stack.run([(840, 200)] * (4 * streams if streams > 1 else 3), streams)
        figures[f"streams_{streams}"] = found
        print(json.dumps({"model": name, "streams": streams, **found}), flush=True)
    if flags.profile:
        figures["profiles"] = [profile(stack, rows, 840) for rows in (1, 16, 128, 256)]
        figures["profiles"].append(profile(stack, 100, 840, mixed=True))
        for each in figures["profiles"]:
            print(json.dumps(each, indent=1), flush=True)
    engine.close()
    return figures


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Qwen3-0.6B,Qwen3-14B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",") if part], default=[1, 16])
    parser.add_argument("--order", choices=["arrival", "longest"], default="longest", help="longest answers first")
    parser.add_argument("--step-tokens", type=int, help="tokens of one step, in place of the model's own")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share a model")
    parser.add_argument("--nccl", action="store_true", help="all sums between GPUs through NCCL")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU")
    if flags.tensor_parallel > 1:
        ranks = str(flags.tensor_parallel)
        subprocess.run([sys.executable, "-m", "bench.all_reduce", "--ranks", ranks], check=True)
    sys.setswitchinterval(5e-4)
    ceilings = measure_ceilings()
    facts = {
        "card": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "copy_tb_per_s": round(ceilings.bytes_per_s / 1e12, 2),
        "product_tflop_per_s": round(ceilings.flops_per_s / 1e12),
    }
    print(json.dumps(facts), flush=True)
    figures = []
    for name in flags.models.split(","):
        figures.append(bench_model(name, ceilings, flags))
        gc.collect()
        torch.cuda.empty_cache()
    if flags.json:
        flags.json.write_text(json.dumps({**facts, "models": figures}, indent=1))


if __name__ == "__main__":
    main()
