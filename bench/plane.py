"""How fast tokens travel: the whole stack around an engine that computes nothing, and clients that cost nothing.

    python -m bench.plane [--streams 1 64 256 1000] [--seconds 8] [--offered 100000] [--paced 1x100 256x40]

Each run launches a stack of its own (fake engine without its self-check, Redis, all services) and prints one line of
JSON: tokens per second, time from the engine's step to the client's byte, CPU per token and memory of each
process. First the open runs, where the engine offers far more than is wanted and the plane may be the limit; then
the paced ones, STREAMSxRATE, where it gives each stream so many tokens per second as a real engine would. A table
and a plot follow, in `bench/out/`. Asserts nothing.
"""

import argparse
import json
import multiprocessing
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from bench.plane_client import Load, Seen, run_clients
from bench.plane_stack import Stack, cpu_s, family, favour, machine

OUT: Final = Path(__file__).resolve().parent / "out"
MAX_SEQ_LEN: Final = 8192
PAGE_SIZE: Final = 64
SETTLE_S: Final = 2.0
MIN_STEP_MS: Final = 1.0
PARTS: Final = ("api", "scheduler", "detokenizer", "tokenizer", "redis", "client")


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        streams: at the same time.
        step_ms: time of an engine step, in which each stream gets a token.
        seconds: measured.
        max_tokens: of one answer.
        apis, detokenizers: instances of them.
        api_workers: processes on the api's port.
        clients: client processes.
        nice: priority of all that is measured.
        paced: the engine's rate is the limit, not the plane.
    """

    streams: int
    step_ms: float
    seconds: float
    max_tokens: int
    api_workers: int = 1
    detokenizers: int = 1
    clients: int = 1
    nice: int = 0
    paced: bool = False

    @property
    def name(self) -> str:
        """Say what the run is."""
        rate = f"{1e3 / self.step_ms:g}/s" if self.paced else "open"
        return f"{self.streams} x {rate}"


def measure(plan: Plan) -> dict[str, Any]:
    """Launch, load, measure, end; give the figures."""
    flags = {
        "engine": "fake", "fake-step-ms": plan.step_ms, "max-running-requests": plan.streams + 8,
        "page-size": PAGE_SIZE, "max-seq-len": MAX_SEQ_LEN, "max-queued-requests": 10_000,
        "num-pages": (plan.streams + 8) * (plan.max_tokens // PAGE_SIZE + 3),
        "detokenizers": plan.detokenizers, "api-workers": plan.api_workers,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with Stack(*words, env={"MILLRACE_FAKE_CHECK": "false", "MILLRACE_FAKE_STAMPS": "true"}) as stack:
        return {"run": plan.name, **asdict(plan), **_load(stack, plan)}


def _load(stack: Stack, plan: Plan) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    clients, pipes = [], []
    for number in range(plan.clients):
        streams = len(range(number, plan.streams, plan.clients))
        ours, theirs = spawn.Pipe()
        load = Load(stack.host, stack.port, stack.model, streams, plan.max_tokens)
        client = spawn.Process(target=run_clients, args=(load, theirs), daemon=True)
        client.start()
        clients.append(client)
        pipes.append(ours)
    watched = [psutil.Process(client.pid) for client in clients]
    measured = [child.pid for process in (*stack.processes.values(), *watched) for child in family(process)]
    favour(measured, plan.nice)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    time.sleep(SETTLE_S)
    before, since_ns = _cpu(stack, watched), time.time_ns()
    time.sleep(plan.seconds)
    after, until_ns = _cpu(stack, watched), time.time_ns()
    rss = _group({**stack.rss_bytes(), "client": sum(int(p.memory_info().rss) for p in watched)})
    for pipe in pipes:
        pipe.send((since_ns, until_ns))
    seen = [pipe.recv() for pipe in pipes]
    for client in clients:
        client.join()
    return _figures(seen, {part: after[part] - before[part] for part in after}, rss, (until_ns - since_ns) / 1e9)


def _cpu(stack: Stack, clients: list[psutil.Process]) -> dict[str, float]:
    return _group({**stack.cpu_s(), "client": sum(map(cpu_s, clients))})


def _group(figures: dict[str, Any]) -> dict[str, Any]:
    """Add up the instances of each part."""
    return {part: sum(v for name, v in figures.items() if name.partition("-")[0] == part) for part in PARTS}


def _figures(seen: list[Seen], cpu: dict[str, float], rss: dict[str, int], wall_s: float) -> dict[str, Any]:
    tokens, chunks = sum(s.tokens for s in seen), sum(s.chunks for s in seen)
    errors = [error for s in seen for error in s.errors]
    return {
        "tokens_per_s": round(tokens / wall_s, 1),
        "added_ms": _spread([s.ages_ns for s in seen]),
        "ttft_ms": _spread([s.ttft_ns for s in seen]),
        "tokens_per_chunk": round(tokens / max(1, chunks), 2),
        "chunks_per_read": round(chunks / max(1, sum(s.reads for s in seen)), 2),
        "cpu_us_per_token": {part: round(value / max(1, tokens) * 1e6, 2) for part, value in cpu.items()},
        "cpu_share": {part: round(value / wall_s, 3) for part, value in cpu.items()},
        "rss_mib": {part: round(value / 2**20, 1) for part, value in rss.items()},
        "errors": errors[:3],
        "num_errors": len(errors),
    }


def _spread(parts: list[Any]) -> dict[str, float | None]:
    values = np.concatenate(parts) / 1e6
    if not len(values):
        return {"p50": None, "p99": None, "max": None}
    p50, p99, top = np.percentile(values, [50, 99, 100])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(top), 2)}


def print_table(results: list[dict[str, Any]]) -> None:
    """Print the runs side by side; CPU in microseconds per token."""
    head = ("run", "tok/s", "p50 ms", "p99 ms", "tok/chunk", *PARTS, "all", "errors")
    rows = [head]
    for r in results:
        cpu = r["cpu_us_per_token"]
        total = sum(value for part, value in cpu.items() if part != "client")
        rows.append(
            (r["run"], f"{r['tokens_per_s']:.0f}", str(r["added_ms"]["p50"]), str(r["added_ms"]["p99"]),
             str(r["tokens_per_chunk"]), *(f"{cpu[part]:.1f}" for part in PARTS), f"{total:.1f}", str(r["num_errors"]))
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw CPU per token by process, and the added latency of the paced runs; needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    bottom = np.zeros(len(results))
    names = [f"{r['run']}\n{r['tokens_per_s']:.0f} tok/s" for r in results]
    for part in PARTS:
        values = np.array([r["cpu_us_per_token"][part] for r in results])
        left.bar(names, values, bottom=bottom, label=part)
        bottom += values
    left.set_ylabel("CPU per token, us")
    left.set_ylim(0, 1.1 * max((b for b, r in zip(bottom, results, strict=True) if r["streams"] > 1), default=1))
    left.legend()
    paced = [r for r in results if r["paced"]]
    for key in ("p50", "p99"):
        right.plot([r["run"] for r in paced], [r["added_ms"][key] for r in paced], marker="o", label=key)
    right.set_yscale("log")
    right.set_ylabel("engine step to client byte, ms")
    right.legend()
    for axis in (left, right):
        axis.tick_params(axis="x", labelsize=7)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def _plans(args: argparse.Namespace) -> list[Plan]:
    more = {"seconds": args.seconds, "max_tokens": args.max_tokens, "api_workers": args.api_workers,
            "detokenizers": args.detokenizers, "clients": args.clients,
            "nice": args.nice}  # fmt: skip
    plans = [Plan(streams, max(MIN_STEP_MS, 1e3 * streams / args.offered), **more) for streams in args.streams]
    for pace in args.paced:
        streams, rate = pace.split("x")
        plans.append(Plan(int(streams), 1e3 / float(rate), paced=True, **more))
    return plans


def main() -> None:
    """Make the runs and show them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64, 256, 1000], help="of the open runs")
    parser.add_argument("--paced", nargs="*", default=["1x50", "64x40", "256x40", "1000x10"], metavar="STREAMSxRATE")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured per run")
    parser.add_argument("--offered", type=float, default=100_000, help="tokens per second at most, in the open runs")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of one answer")
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--detokenizers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--nice", type=int, default=0, help="below 0: measure ahead of what else the machine does")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    print(machine())
    results = []
    with (OUT / "plane.jsonl").open("a") as lines:
        for plan in [plan for plan in _plans(args) for _ in range(args.repeat)]:
            result = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": machine(), **measure(plan)}
            results.append(result)
            print(json.dumps(result), flush=True)
            print(json.dumps(result), file=lines, flush=True)
    print_table(results)
    plot(results, OUT / "plane.png")


if __name__ == "__main__":
    main()
