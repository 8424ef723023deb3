"""Our whole stack beside `transformers serve`, on the same machine, in the same run, with the same client.

    python -m bench.served_cpu [--streams 1,8,32] [--requests 64] [--repeats 3] [--peer-args "..."] [--json FILE]
        [--alone [--whole]]

Both serve SmolLM2-135M-Instruct on the CPU, ours from its GGUF, the peer from the same weights as safetensors in
bfloat16. 64 requests of 16 to 128 words are asked for 16 to 64 tokens at temperature 0.6, so many at a time; the figure
is tokens per second over all of them. Both stay up, only one is asked at a time, and they take turns in every repeat,
so that a machine that grows busier slows both. Prints medians, and how many times the peer's. `--whole` asks ours alone
for completions that do not end before their last token.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import httpx

from services.scheduler.engine.device import describe_processor
from shared.model_files import EMBEDDED_NAME, locate

ROOT: Final = Path(__file__).resolve().parent.parent
READY_S: Final = 300.0
ANSWER_S: Final = 900.0
_WORDS: Final = (
    "river",
    "stone",
    "garden",
    "window",
    "letter",
    "summer",
    "engine",
    "market",
    "silver",
    "morning",
    "paper",
    "bridge",
    "winter",
    "forest",
    "signal",
    "story",
    "number",
    "village",
    "music",
    "harbour",
    "candle",
)


def draw_requests(number: int, seed: int) -> list[tuple[str, int]]:
    """Draw texts and the tokens asked for; no two repeats share a prompt."""
    rng = random.Random(seed)
    return [
        ("Write about: " + " ".join(rng.choices(_WORDS, k=rng.randint(16, 128))), rng.randint(16, 64))
        for _ in range(number)
    ]


# --- the client --------------------------------------------------------------------------------------------


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, text: str, tokens: int, *, whole: bool = False
) -> int:
    """Stream one answer to a chat, or one that is `whole`: a completion of all the tokens; returns its tokens."""
    kind: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if whole:
        kind = {"prompt": text, "ignore_eos": True}
    body = {
        "model": model,
        **kind,
        "max_tokens": tokens,
        "temperature": 0.6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces, counted = 0, None
    path = "completions" if whole else "chat/completions"
    async with session.post(f"{url}/{path}", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
            pieces += any(choice.get("delta", {}).get("content") for choice in event.get("choices") or ())
    return pieces if counted is None else int(counted)


async def run(url: str, model: str, requests: list[tuple[str, int]], streams: int, *, whole: bool = False) -> float:
    """Ask all, so many at a time; returns tokens per second."""
    waiting, total = list(requests), 0

    async def stream(session: aiohttp.ClientSession) -> None:
        nonlocal total
        while waiting:
            text, tokens = waiting.pop()
            said = await ask(session, url, model, text, tokens, whole=whole)
            total += said  # in two lines: others add to it while this one waits

    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(stream(session) for _ in range(streams)))
        return total / (time.perf_counter() - began)


# --- the servers -------------------------------------------------------------------------------------------


def free_port() -> int:
    """Find one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_peer_model(folder: Path) -> str:
    """Write the embedded model as the peer wants it: safetensors in bfloat16, with its tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, LlamaConfig

    from services.scheduler.engine.models.config import read_config
    from services.scheduler.engine.weights.gguf import open_gguf

    files = locate(EMBEDDED_NAME)
    config = LlamaConfig(**{**files.config, "dtype": "bfloat16"})
    config.save_pretrained(folder)
    # Without it the peer takes the likeliest token, whatever temperature it is asked for.
    sampled = {"do_sample": True, "eos_token_id": list(files.eos_token_ids), "pad_token_id": files.eos_token_ids[0]}
    (folder / "generation_config.json").write_text(json.dumps(sampled))
    sources = open_gguf(files.path, read_config(files.config))
    tensors = {name: source.read().to(torch.bfloat16) for name, source in sources.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(files.path.parent), gguf_file=files.path.name)
    tokenizer.chat_template = files.chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)


@contextmanager
def server(name: str, argv: list[str], url: str, folder: Path) -> Iterator[None]:
    """Run a server as long as the block lasts, from when it answers."""
    log = folder / f"{name}.log"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, cwd=ROOT, env=clean, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + READY_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > until:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise RuntimeError(f"{name} does not answer:\n{tail}")
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url.removesuffix('/v1')}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


# --- the comparison ----------------------------------------------------------------------------------------


def compare(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure both, in turns."""
    ours, peer = (f"http://127.0.0.1:{free_port()}/v1" for _ in range(2))
    argv = [sys.executable, "-m", "services.launcher", "serve", "--port", ours.split(":")[2].removesuffix("/v1")]
    argv += ["--run-dir", str(folder / "run"), *shlex.split(flags.args)]
    targets = {"millrace": (ours, EMBEDDED_NAME)}
    with server("millrace", argv, ours, folder):
        if not flags.alone:
            model = write_peer_model(folder / "model")
            port = peer.split(":")[2].removesuffix("/v1")
            argv = [str(Path(sys.executable).with_name("transformers")), "serve", model, "--port", port]
            argv += ["--device", "cpu", "--dtype", "bfloat16", *shlex.split(flags.peer_args)]
            targets["transformers serve"] = (peer, model)
        with server("transformers", argv, peer, folder) if not flags.alone else _nothing():
            return _measure(flags, targets)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _measure(flags: argparse.Namespace, targets: dict[str, tuple[str, str]]) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
    for url, model in targets.values():
        asyncio.run(run(url, model, draw_requests(2, -1), 1))
    for repeat in range(flags.repeats):
        for streams in flags.streams:
            for name, (url, model) in targets.items():
                requests = draw_requests(flags.requests, 100 * repeat + streams)
                speed = asyncio.run(run(url, model, requests, streams, whole=flags.whole))
                found[name].setdefault(str(streams), []).append(round(speed, 1))
                print(f"repeat {repeat + 1}, {streams:2} streams, {name}: {speed:.1f} tokens/s", flush=True)
    medians = {name: {s: statistics.median(v) for s, v in runs.items()} for name, runs in found.items()}
    return {
        "machine": describe_processor(),
        "load_average": os.getloadavg()[0],
        "requests": flags.requests,
        "runs": found,
        "median_tokens_per_s": medians,
    }


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--args", default="", help="flags of our launcher")
    parser.add_argument("--peer-args", default="", help="flags of the peer")
    parser.add_argument("--alone", action="store_true", help="without the peer")
    parser.add_argument("--whole", action="store_true", help="completions, of all the tokens asked for; with --alone")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    if flags.whole and not flags.alone:
        parser.error("--whole needs --alone: the peer has no such completions")
    with tempfile.TemporaryDirectory() as folder:
        found = compare(flags, Path(folder))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\n{found['machine']}, load {found['load_average']:.1f}; tokens/s, median of {flags.repeats}")
    for streams in map(str, flags.streams):
        speeds = [medians[streams] for medians in found["median_tokens_per_s"].values()]
        ratio = f", {speeds[0] / speeds[1]:.2f} times the peer" if len(speeds) > 1 else ""
        print(f"{streams:>3} streams: {' against '.join(f'{speed:.1f}' for speed in speeds)}{ratio}")


if __name__ == "__main__":
    main()
