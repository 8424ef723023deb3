"""How long the step loop itself takes: Python per step, without the engine and without the broker.

    python -m bench.loop [--rows 1 16 64 256] [--steps 400] [--page-size 16]

The fake engine computes nothing to speak of and takes no time, so what is measured is taking, planning, settling and
handing over. Three loads: rows that only decode, rows beside a long prompt in chunks, and short requests that
come and go. Prints microseconds per step and the machine; asserts nothing. The median says what the loop costs, the
mean also what the rest of the machine took from it.
"""

import argparse
import os
import platform
import statistics
from pathlib import Path

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.link import Arrival, Load, StepOutput
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.fake_engine import FakeEngine, FakeEngineConfig
from services.scheduler.loop import StepLoop
from shared.messages import ErrorBody, GenerateRequest
from shared.sampling import SamplingParams


class QuietLink:
    """A Link that hands over what it is given and forgets what it is told."""

    paused = False

    def __init__(self) -> None:
        self.waiting: list[Arrival] = []
        self.num_tokens = 0
        self.num_ends = 0

    def arrivals(self) -> list[Arrival]:
        """Take what waits."""
        taken, self.waiting = self.waiting, []
        return taken

    def endings(self) -> list[tuple[str, int]]:
        """End nobody."""
        return []

    def await_look(self) -> float:
        """Never wait."""
        return 0.0

    def planned(self) -> None:
        """Ignore."""

    def publish(self, output: StepOutput) -> None:
        """Count."""
        self.num_tokens += len(output.tokens)
        self.num_ends += len(output.finishes)

    def fail(self, uid: str, attempt: int, error: ErrorBody) -> None:
        """Stop: nothing fails here."""
        raise RuntimeError(error.message)

    def report(self, load: Load) -> None:
        """Ignore."""

    def idle(self, timeout_s: float) -> None:
        """Never sleep."""


def _arrival(number: int, prompt_len: int, max_tokens: int) -> Arrival:
    prompt = [number % 251, number // 251 % 251, *range(prompt_len - 2)]
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=number)
    return Arrival(GenerateRequest(f"{number:032x}", [i % 251 for i in prompt], params), 1)


def _bench(name: str, rows: int, steps: int, page_size: int) -> None:
    config = FakeEngineConfig(
        num_pages=40 * rows * 64 // page_size + 65536 // page_size,
        page_size=page_size,
        max_running=rows + 1,
        max_seq_len=40960,
        max_step_tokens=8192,
        base_ms=0.0,
        check=False,
    )
    engine, link = FakeEngine(config), QuietLink()
    loop = StepLoop(engine, link, Scheduler(engine.limits, SchedulerConfig(max_prefill_tokens=2048, max_gap_ratio=0)))
    lifetime = 32 if name == "churn" else 100_000
    number = rows
    link.waiting = [_arrival(i, 200, 30_000 if name != "churn" else 8 + i % lifetime) for i in range(rows)]
    while link.num_tokens < 4 * rows:
        loop.turn()
    if name == "prompt":
        link.waiting.append(_arrival(number, 40_000, 8))
    first, tokens, ends, turns_us = loop.stats.steps, link.num_tokens, link.num_ends, []
    while loop.stats.steps < first + (steps if name != "prompt" else 19):
        python_s = loop.stats.python_s
        loop.turn()
        turns_us.append((loop.stats.python_s - python_s) * 1e6)
        if name == "churn":
            for _ in range(link.num_ends - ends):
                number += 1
                link.waiting.append(_arrival(number, 200, lifetime))
            ends = link.num_ends
    per_step = (link.num_tokens - tokens) / len(turns_us)
    median, mean = statistics.median(turns_us), statistics.fmean(turns_us)
    print(
        f"{name:7} {rows:4} rows: {median:6.0f} us of Python per step (median; mean {mean:.0f}),"
        f" {median / per_step:7.2f} us per token at {per_step:.0f} tokens per step"
    )


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    """Run the three loads at each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--page-size", type=int, default=16)
    args = parser.parse_args()
    print(_machine())
    for rows in args.rows:
        for name in ("decode", "prompt", "churn"):
            _bench(name, rows, args.steps, args.page_size)


if __name__ == "__main__":
    main()
