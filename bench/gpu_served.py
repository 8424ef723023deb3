"""The whole stack on a GPU, as a client sees it: many streams, a few, one, and a long prompt beside running streams.

    python -m bench.gpu_served [--tokenizer DIR] [--models Qwen3-0.6B,Qwen3-14B] [--repeats 3] [--args "..."]
    python -m bench.gpu_served --models Qwen3-14B --long 32000 --streams ""

Launches api (4 workers), tokenizer, scheduler, detokenizers and Redis on this machine, on dummy weights, and asks over
HTTP from processes of its own. `--tokenizer` names a folder with the real tokenizer.json of the model; without it one
with as many words is made. The workload is that of `bench.gpu`; so are the ceilings and the floor that stand beside
the figures.
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.load_client import WORDS, run_load
from bench.long_prompt import measure as measure_long_prompt
from bench.plane_stack import Stack, machine
from bench.workloads import MODELS, Ceilings, Sizes, draw_lengths, floor_s, write_model

REQUESTS: Final = {256: 256, 16: 64, 1: 6}
"""Requests of one run, by streams."""
FLAGS: Final = (
    "--load-format dummy --device cuda --api-workers 4 --detokenizers 2 --max-running-requests 256 --max-seq-len {seq} "
    "--max-queued-requests 1024 --max-queued-tokens 2000000"
)


def write_served_model(name: str, tokenizer: Path | None, folder: Path) -> Path:
    """Write a model's config beside its tokenizer, or one with as many words; returns the folder of the model."""
    path = write_model(name, folder)
    if tokenizer is None:
        make_tokenizer(MODELS[name]["vocab_size"]).save(str(path / "tokenizer.json"))
        return path
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "vocab", "merges", "chat_template")):
            shutil.copy(file, path)
    return path


def make_tokenizer(size: int) -> Tokenizer:
    """Make a byte-level tokenizer to which each of our words is one token; the other tokens are never in a prompt."""
    vocab = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        for end in range(1, len(word) + 1):
            whole = f"\u0120{word[:end]}"  # with the space before it
            if whole not in vocab:
                merges.append((whole[:-1], whole[-1]))
                vocab[whole] = len(vocab)
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), size)}
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def serve(stack: Stack, name: str, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """All figures of closed loops."""
    url, lengths, lines = f"http://{stack.host}:{stack.port}/v1", draw_lengths(), []
    run_load(url, stack.model, lengths[:32], 32, seed=99)
    for streams in flags.streams:
        for repeat in range(flags.repeats):
            before = stack.cpu_s()
            asked = lengths[: REQUESTS.get(streams, 4 * streams)]
            line = {"model": name, **run_load(url, stack.model, asked, streams, seed=streams + repeat)}
            spent = {service: used - before[service] for service, used in stack.cpu_s().items()}
            tokens = sum(answer for _, answer in asked)
            line["cpu_us_per_token"] = {service: round(1e6 * s / tokens, 1) for service, s in spent.items()}
            print(json.dumps(line), flush=True)
            lines.append(line)
    return lines


def long_prompt(stack: Stack, flags: argparse.Namespace) -> None:
    """What a long prompt does to 64 running streams; prints its figures."""
    asyncio.run(
        measure_long_prompt(
            argparse.Namespace(
                url=f"http://{stack.host}:{stack.port}", tokens=flags.long, rounds=2, warm_up=2, quiet=4.0,
                streams=64, length=2500,
            )
        )
    )  # fmt: skip


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Qwen3-0.6B")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--streams", type=lambda t: [int(part) for part in t.split(",") if part], default=[256, 16, 1])
    parser.add_argument("--long", type=int, default=0, help="tokens of a long prompt beside 64 streams; 0 is none")
    parser.add_argument("--args", default="", help="more flags of the launcher")
    parser.add_argument("--ceilings", type=Path, help="facts that bench.gpu wrote, for the floor")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    facts = json.loads(flags.ceilings.read_text()) if flags.ceilings else {}
    print(machine(), flush=True)
    found = []
    for name in flags.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = write_served_model(name, flags.tokenizer, Path(folder))
            seq = min(40960, flags.long + 4096)
            argv = [*shlex.split(FLAGS.format(seq=seq)), "--model", str(model), *shlex.split(flags.args)]
            with Stack(*argv, env={"OMP_NUM_THREADS": "1"}) as stack:
                try:
                    lines = serve(stack, name, flags)
                    if flags.long:
                        long_prompt(stack, flags)
                except BaseException:
                    print(stack.log.read_text(errors="replace")[-4000:], file=sys.stderr)
                    raise
        summary = _summary(name, lines, facts)
        print(json.dumps(summary), flush=True)
        found.append({**summary, "runs": lines})
    if flags.json:
        flags.json.write_text(json.dumps({"machine": machine(), "load": os.getloadavg()[0], "models": found}, indent=1))


def _summary(name: str, lines: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    medians: dict[str, Any] = {"model": name}
    for streams in dict.fromkeys(line["streams"] for line in lines):
        own = [line for line in lines if line["streams"] == streams]
        medians[f"streams_{streams}"] = {
            "tok_per_s": statistics.median(line["tok_per_s"] for line in own),
            "first_p50_ms": statistics.median(line["first_ms"]["p50"] for line in own),
            "gap_p50_ms": statistics.median(line["gap_ms"]["p50"] for line in own),
            "gap_p99_ms": statistics.median(line["gap_ms"]["p99"] for line in own),
        }
    if facts:
        ceilings = Ceilings(1e12 * facts["copy_tb_per_s"], 1e12 * facts["product_tflop_per_s"])
        lengths = draw_lengths()
        floor = floor_s(Sizes.of(MODELS[name]), lengths, ceilings)
        medians["floor_tok_per_s"] = round(sum(answer for _, answer in lengths) / floor)
    return medians


if __name__ == "__main__":
    main()
