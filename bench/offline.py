"""Offline throughput of any model, on any workload and device, beside the least time that the workload could take.

    python -m bench.offline [--model M] [--device cpu] [--dtype D] [--load-format dummy] [--requests 64]
        [--prompt 16-128] [--answer 16-64] [--lengths FILE] [--max-running 32] [--repeats 3] [--out bench/out]

Measures the device's ceilings first: a large copy and a large product, in the model's precision and with its threads.
The floor is what the workload takes there when every weight and every key is read once per step and nothing else costs
anything. Runs the real scheduler and step loop without a broker. Writes `offline.json` and a plot of step time by
batch, and prints a table. Prompts are random ids; they differ between repeats, so none finds another's prefix.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.loop import QuietLink
from bench.workloads import Ceilings
from services.scheduler import service
from services.scheduler.core.batch import Batch, MaskArray, StepResult
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.link import Arrival
from services.scheduler.core.ports import Engine, EngineLimits, Step
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.device import describe_processor, pick_device, pick_dtype
from services.scheduler.engine.kernels.packed_linear import MAX_INT4_TOKENS, has_int4
from services.scheduler.engine.models.config import ModelConfig
from services.scheduler.engine.models.registry import describe
from services.scheduler.loop import StepLoop
from services.scheduler.settings import SchedulerSettings
from shared.messages import GenerateRequest
from shared.sampling import SamplingParams
from shared.settings import load

Lengths = Sequence[tuple[int, int]]
"""(tokens of the prompt, tokens of the answer) of each request."""
INT4_BYTES: Final = 0.625
"""Bytes per weight in groups of 32: four bits each, and a scale and a zero of two bytes."""
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


# --- the floor ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs, in numbers of the model.

    Attributes:
        dense: weights that every token goes through, without the head.
        expert: weights of one expert over all layers that have experts.
        num_experts, per_token: experts of such a layer, and how many a token goes to.
        head: weights of the head.
        kv_bytes: of one token.
        item_bytes: of a weight.
        small_bytes: of a weight of the layers, for steps of at most MAX_INT4_TOKENS rows.
    """

    dense: int
    expert: int
    num_experts: int
    per_token: int
    head: int
    kv_bytes: int
    item_bytes: float
    small_bytes: float

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, *, int4: bool) -> "Work":
        """Count."""
        hidden, layers = config.hidden_size, config.num_layers
        heads = 2 * config.num_qo_heads + 2 * config.num_kv_heads
        sparse = layers - len(config.dense_layers) if config.num_experts else 0
        dense = hidden * config.head_dim * heads * layers + 3 * hidden * config.intermediate_size * (layers - sparse)
        kv_bytes = 2 * config.num_kv_heads * config.head_dim * layers * dtype.itemsize
        return cls(
            dense=dense,
            expert=3 * hidden * config.expert_size * sparse,
            num_experts=config.num_experts,
            per_token=config.experts_per_token,
            head=hidden * config.vocab_size,
            kv_bytes=kv_bytes,
            item_bytes=dtype.itemsize,
            small_bytes=INT4_BYTES if int4 else dtype.itemsize,
        )

    def decode_s(self, rows: int, context: int, ceilings: Ceilings) -> float:
        """The least time of a step of so many rows that look at so many tokens together."""
        touched = min(self.num_experts, rows * self.per_token) * self.expert
        item = self.small_bytes if rows <= MAX_INT4_TOKENS else self.item_bytes
        reads = (self.dense + touched) * item + self.head * self.item_bytes
        products = 2.0 * rows * (self.dense + self.per_token * self.expert + self.head)
        # A copy moves each byte twice; weights are only read, so the ceiling counts reads and writes together.
        weights_s = max(reads / ceilings.bytes_per_s, products / ceilings.flops_per_s)
        return weights_s + context * self.kv_bytes / ceilings.bytes_per_s

    def prefill_s(self, tokens: int, ceilings: Ceilings) -> float:
        """The least time of so many prompt tokens."""
        return 2.0 * tokens * (self.dense + self.per_token * self.expert) / ceilings.flops_per_s


def floor_s(work: Work, lengths: Lengths, max_running: int, ceilings: Ceilings) -> float:
    """The least time of a workload, longest answers first, as many at a time as there are slots."""
    waiting = sorted(lengths, key=lambda each: each[1])
    total = work.prefill_s(sum(prompt for prompt, _ in lengths), ceilings)
    running: list[list[int]] = []
    while waiting or running:
        while waiting and len(running) < max_running:
            prompt, answer = waiting.pop()
            running.append([prompt, answer - 1])  # the prompt's own step draws the first token
        running = [[context + 1, left - 1] for context, left in running if left > 0]
        if running:
            total += work.decode_s(len(running), sum(context for context, _ in running), ceilings)
    return total


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure a large copy and a large product, on the device and with the threads of the model."""
    large = device.type == "cuda"
    source = torch.ones((4 << 30) if large else (256 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 8192 if large else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    copy_s = statistics.median(_timed(lambda: target.copy_(source), device) for _ in range(7))
    product_s = statistics.median(_timed(lambda: a @ b, device) for _ in range(7))
    return Ceilings(2 * source.nbytes / copy_s, 2 * size**3 / product_s)


def _timed(body: Callable[[], object], device: torch.device) -> float:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    body()
    settle()
    began = time.perf_counter()
    body()
    settle()
    return time.perf_counter() - began


# --- the runs ----------------------------------------------------------------------------------------------


class TimedEngine:
    """An engine that notes what each step had to do and how long the device took.

    Attributes:
        steps: (rows, tokens, milliseconds) of each.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[tuple[int, int, float]] = []

    @property
    def limits(self) -> EngineLimits:
        """Of the engine."""
        return self._engine.limits

    def launch(self, batch: Batch) -> Step:
        """Pass it on."""
        return self._engine.launch(batch)

    def guide(self, step: Step, masks: MaskArray) -> None:
        """Pass it on."""
        self._engine.guide(step, masks)

    def wait(self, step: Step) -> StepResult:
        """Pass it on, and note the time."""
        result = self._engine.wait(step)
        self.steps.append((step.batch.num_rows, len(step.batch.input_ids), result.forward_ms))
        return result

    def check(self) -> None:
        """Pass it on."""
        self._engine.check()

    def close(self) -> None:
        """Pass it on."""
        self._engine.close()


class Bench:
    """One engine under the real scheduler and loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = TimedEngine(engine)
        self._link = QuietLink()
        config = SchedulerConfig(max_prefill_tokens=engine.limits.max_step_tokens, max_gap_ratio=0.0)
        self._loop = StepLoop(self.engine, self._link, Scheduler(engine.limits, config))
        self._number = 0

    def run(self, lengths: Lengths) -> float:
        """Run requests, all at once and the longest first; returns seconds."""
        wanted = self._link.num_ends + len(lengths)
        self._link.waiting = [self._arrival(*each) for each in sorted(lengths, key=lambda each: -each[1])]
        began = time.perf_counter()
        while self._link.num_ends < wanted:
            self._loop.turn()
        seconds = time.perf_counter() - began
        self._loop.settle_all()
        return seconds

    def step_ms(self, rows: int, steps: int = 24) -> float:
        """The median time of a step of so many decoding rows."""
        self.engine.steps.clear()
        self.run([(32, steps)] * rows)
        return statistics.median(ms for found, tokens, ms in self.engine.steps if found == tokens == rows)

    def _arrival(self, prompt: int, answer: int) -> Arrival:
        self._number += 1
        ids = np.random.default_rng(self._number).integers(0, self.engine.limits.vocab_size, prompt).tolist()
        params = SamplingParams(max_tokens=answer, temperature=0.6, ignore_eos=True, seed=self._number)
        return Arrival(GenerateRequest(f"{self._number:032x}", ids, params), 1)


def draw_lengths(number: int, prompt: tuple[int, int], answer: tuple[int, int]) -> Lengths:
    """Draw a workload; the same every time."""
    rng = random.Random(0)
    return [(rng.randint(*prompt), rng.randint(*answer)) for _ in range(number)]


def measure(settings: SchedulerSettings, lengths: Lengths, repeats: int) -> dict[str, Any]:
    """All figures of one model."""
    files = service.find_files(settings)
    config, device = describe(files.config), pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, config.dtype, device)
    engine = service.build(settings)
    ceilings = measure_ceilings(device, dtype)
    int4 = device.type == "cpu" and dtype == torch.bfloat16 and files.kind == "gguf" and has_int4()
    work = Work.of(config, dtype, int4=int4)
    bench = Bench(engine)
    try:
        bench.run([(8, 4)] * 2)
        seconds = [bench.run(lengths) for _ in range(repeats)]
        rows = [n for n in _ROWS if n <= engine.limits.max_running]
        curve = [(n, bench.step_ms(n), 1e3 * work.decode_s(n, n * 44, ceilings)) for n in rows]
    finally:
        bench.engine.close()
    tokens = sum(answer for _, answer in lengths)
    taken, least = statistics.median(seconds), floor_s(work, lengths, engine.limits.max_running, ceilings)
    return {
        "model": files.served_name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else describe_processor(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "load_average": os.getloadavg()[0],
        "copy_gb_per_s": round(ceilings.bytes_per_s / 1e9, 2),
        "product_gflop_per_s": round(ceilings.flops_per_s / 1e9, 1),
        "requests": len(lengths),
        "prompt_tokens": sum(prompt for prompt, _ in lengths),
        "answer_tokens": tokens,
        "max_running": engine.limits.max_running,
        "seconds": [round(each, 3) for each in seconds],
        "tokens_per_s": round(tokens / taken, 1),
        "floor_s": round(least, 3),
        "floor_tokens_per_s": round(tokens / least, 1),
        "of_floor": round(least / taken, 3),
        "steps": [{"rows": n, "ms": round(ms, 3), "floor_ms": round(low, 3)} for n, ms, low in curve],
    }


# --- what is left behind -----------------------------------------------------------------------------------


def print_table(found: dict[str, Any]) -> None:
    """Print the figures for people."""
    print(f"{found['model']}, {found['dtype']}, {found['device']}, {found['threads']} threads")
    print(f"ceilings: copy {found['copy_gb_per_s']} GB/s, product {found['product_gflop_per_s']} GFLOP/s")
    print(f"{found['requests']} requests, {found['prompt_tokens']} + {found['answer_tokens']} tokens: ", end="")
    print(f"{found['tokens_per_s']} tokens/s, floor {found['floor_tokens_per_s']}, ratio {found['of_floor']}")
    print("\nrows   step ms  floor ms  ratio  tokens/s")
    for each in found["steps"]:
        ratio, speed = each["floor_ms"] / each["ms"], 1e3 * each["rows"] / each["ms"]
        print(f"{each['rows']:4}  {each['ms']:8.2f}  {each['floor_ms']:8.2f}  {ratio:5.2f}  {speed:8.1f}")


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw step time by batch, and its floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    rows = [each["rows"] for each in found["steps"]]
    axes.plot(rows, [each["ms"] for each in found["steps"]], "o-", label="step")
    axes.plot(rows, [each["floor_ms"] for each in found["steps"]], "--", label="floor")
    axes.set(xscale="log", yscale="log", xlabel="decoding rows", ylabel="milliseconds")
    axes.set_title(f"{found['model']}, {found['dtype']}: {found['tokens_per_s']} tokens/s")
    axes.set_xticks(rows, [str(n) for n in rows])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _range(text: str) -> tuple[int, int]:
    return int(text.partition("-")[0]), int(text.rpartition("-")[2])


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    for name in ("--device", "--dtype", "--load-format"):
        parser.add_argument(name, default="auto")
    for name, number in (("--tp", 1), ("--threads", None), ("--requests", 64), ("--max-running", 32), ("--repeats", 3)):
        parser.add_argument(name, type=int, default=number)
    for name, default in (("--prompt", (16, 128)), ("--answer", (16, 64))):
        parser.add_argument(name, type=_range, default=default, help="tokens, or from-to")
    parser.add_argument("--lengths", type=Path, help="JSON list of [prompt, answer] instead")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    flags = parser.parse_args()
    sys.setswitchinterval(service.SWITCH_INTERVAL_S)
    fields = {
        "model": flags.model,
        "device": flags.device,
        "dtype": flags.dtype,
        "load_format": flags.load_format,
        "tensor_parallel_size": flags.tp,
        "threads": flags.threads,
        "max_running_requests": flags.max_running,
    }
    lengths: Lengths = draw_lengths(flags.requests, flags.prompt, flags.answer)
    if flags.lengths:
        lengths = [(prompt, answer) for prompt, answer in json.loads(flags.lengths.read_text())]
    found = measure(load(SchedulerSettings, fields), lengths, flags.repeats)
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "offline.json").write_text(json.dumps(found, indent=2) + "\n")
    plot(found, flags.out / "offline.png")
    print_table(found)


if __name__ == "__main__":
    main()
