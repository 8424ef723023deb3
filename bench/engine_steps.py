"""Time of an engine's decode steps by batch size, and of prefill chunks, in process and without a broker.

    python -m bench.engine_steps [--model NAME] [--dtype auto] [--batches 1,8,32] [--context 128] [--threads N]

Two steps are kept in flight, as the scheduler does. The numbers are for the machine it prints.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from services.scheduler.core.batch import FROM_DEVICE, Batch, SlotSetup
from services.scheduler.engine.device import describe_processor
from services.scheduler.engine.engine import EngineConfig, build_engine
from services.scheduler.engine.local import LocalEngine
from shared.model_files import EMBEDDED_NAME, locate
from shared.sampling import SamplingParams


def main() -> None:
    """Read the arguments, build the engine, print the table."""
    args = _arguments()
    largest = max(args.batches)
    files = locate(args.model, weights=args.load_format == "auto")
    pages_each = -(-(args.context + args.steps + 2) // args.page_size)
    chunk_pages = -(-max(args.chunks) // args.page_size)
    config = EngineConfig(
        dtype=args.dtype,
        load_format=args.load_format,
        page_size=args.page_size,
        num_pages=max(largest * pages_each, chunk_pages) + 1,
        max_running=largest,
        max_step_tokens=max(largest, args.context, *args.chunks),
        threads=args.threads,
    )
    started = time.perf_counter()
    engine = build_engine(config, files)
    try:
        print(f"{describe_processor()}; torch {torch.__version__}, {torch.get_num_threads()} threads")
        print(f"{args.model}, {engine.limits.fingerprint}; ready in {time.perf_counter() - started:.1f} s")
        params = SamplingParams(temperature=args.temperature, seed=1)
        print(f"decode at context {args.context}, temperature {args.temperature}:")
        print(f"{'batch':>8} {'p50 ms':>8} {'p90 ms':>8} {'tok/s':>8}")
        for batch in args.batches:
            gaps = list(_decode(engine, batch, args.context, args.steps, pages_each, params))
            median, high = statistics.median(gaps), statistics.quantiles(gaps, n=10)[-1]
            print(f"{batch:>8} {1e3 * median:>8.2f} {1e3 * high:>8.2f} {batch / median:>8.0f}")
        print("prefill of one prompt in one step:")
        print(f"{'tokens':>8} {'p50 ms':>8} {'tok/s':>17}")
        for chunk in args.chunks:
            times = [_prefill(engine, [0], chunk, chunk_pages, params) for _ in range(5)]
            print(f"{chunk:>8} {1e3 * statistics.median(times):>8.1f} {chunk / statistics.median(times):>17.0f}")
    finally:
        engine.close()


def _arguments() -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Time of an engine's steps by batch size")
    parser.add_argument("--model", default=EMBEDDED_NAME)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--batches", type=sizes, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--chunks", type=sizes, default=[32, 128, 512])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def _ints(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _prefill(engine: LocalEngine, slots: list[int], length: int, pages_each: int, params: SamplingParams) -> float:
    """Compute one prompt per slot, a step each; returns the seconds."""
    started = time.perf_counter()
    for slot in slots:
        ids = _ints(np.random.default_rng(slot).integers(0, engine.limits.vocab_size, length))
        batch = Batch(
            step=0,
            num_decode=0,
            slots=_ints([slot]),
            starts=_ints([0]),
            lengths=_ints([length]),
            input_ids=ids,
            page_table=_ints([np.arange(slot * pages_each, (slot + 1) * pages_each) + 1]),
            sample=np.ones(1, dtype=np.bool_),
            out_index=_ints([1]),
            setups=(SlotSetup(slot, params, ids, ids[:0]),),
        )
        engine.wait(engine.launch(batch))
    return time.perf_counter() - started


def _decode(
    engine: LocalEngine, rows: int, context: int, steps: int, pages_each: int, params: SamplingParams
) -> Iterator[float]:
    """Run decode steps, two in flight; yields the seconds between their ends."""
    _prefill(engine, list(range(rows)), context, pages_each, params)
    slots = _ints(np.arange(rows))
    table = _ints(np.arange(rows * pages_each).reshape(rows, pages_each) + 1)

    def launch(step: int) -> object:
        return engine.launch(
            Batch(
                step=step,
                num_decode=rows,
                slots=slots,
                starts=_ints(np.full(rows, context + step)),
                lengths=_ints(np.ones(rows)),
                input_ids=_ints(np.full(rows, FROM_DEVICE)),
                page_table=table,
                sample=np.ones(rows, dtype=np.bool_),
                out_index=_ints(np.full(rows, step + 2)),
            )
        )

    ahead = launch(0)
    before = time.perf_counter()
    for step in range(1, steps):
        following = launch(step)
        engine.wait(ahead)  # type: ignore[arg-type]
        ahead = following
        now = time.perf_counter()
        if step > 5:
            yield now - before
        before = now
    engine.wait(ahead)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
