"""What thousands of requests leave behind: nothing, and no service grows.

    python -m bench.soak [--requests 10000] [--at-once 32]

Launches the whole stack with the fake engine and asks for streams, of which a third hang up at a random moment: before
the first byte, within the answer, or just before its end. Prints one line of JSON: memory of every service and of
Redis after each tenth of the requests and its growth after the first one, and what is left at the end: keys of
requests, entries of streams, slots, requests in flight, pages that are neither free nor cached. Exits with 1 when
something is left, or when a memory has grown by 5 % or more.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import redis

from bench.plane_stack import Stack, machine

HUNG_UP: Final = 1 / 3
MAX_TOKENS: Final = 60
MAX_GROWTH: Final = 0.05
STEP_MS: Final = 2.0
IDLE_REPLY_S: Final = 5.0
"""A detokenizer forgets replies that were hung up after so long; its default is a minute."""
QUIET_LIMIT_S: Final = 70.0
"""How long what is left may take to go: a log that nobody deletes dies a minute after its end."""
KEPT: Final = re.compile(r"^[^:]+:(meta|alive:\w+|dead|tokenize:[^:]+|inbox:[^:]+|generate:[^:]+|tokens:[^:]+:\d+)$")
"""Keys of the installation and its instances, which stay; any other is a request's."""
EMPTIED: Final = re.compile(r"^[^:]+:(tokenize|generate|tokens|inbox|dead)(:|$)")
"""Streams that are empty when nothing runs."""
GAUGES: Final = {
    "api": ("millrace_requests_in_flight", "millrace_http_open_generations"),
    "scheduler": ("millrace_requests_running", "millrace_requests_waiting", 'millrace_kv_pages{state="live"}'),
    "detokenizer": ("millrace_detokenizer_replies",),
}
"""Gauges that are 0 when nothing runs."""


@dataclass(slots=True)
class Told:
    """What the clients saw.

    Attributes:
        whole: streams read to their end.
        hung_up: streams that were left before it.
        wrong: answers that were not what was asked for.
    """

    whole: int = 0
    hung_up: int = 0
    wrong: list[str] = field(default_factory=list)


async def ask(stack: Stack, rng: random.Random, told: Told) -> None:
    """Make one request, and perhaps hang up."""
    tokens = rng.randint(1, MAX_TOKENS)
    leave_after = rng.choice((0, rng.randint(0, tokens), tokens - 1)) if rng.random() < HUNG_UP else -1
    body = json.dumps(
        {"model": stack.model, "messages": [{"role": "user", "content": f"{rng.random()} " * rng.randint(1, 20)}],
         "max_tokens": tokens, "stream": True, "seed": rng.randrange(2**31)}
    ).encode()  # fmt: skip
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {stack.host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(stack.host, stack.port)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        chunks, end = 0, b""
        while leave_after < 0 or chunks < leave_after:
            line = await reader.readline()
            if not line:
                break
            chunks += b'"content":"' in line
            end = line if line.startswith((b"data:", b"HTTP")) else end
        if leave_after >= 0:
            told.hung_up += 1
        elif end.strip() == b"data: [DONE]":
            told.whole += 1
        else:
            told.wrong.append(end.decode(errors="replace")[:200])
    finally:
        writer.transport.abort() if leave_after >= 0 else writer.close()


async def ask_many(stack: Stack, requests: int, at_once: int, rng: random.Random, told: Told) -> None:
    """Make requests, so many of them at once."""
    left = iter(range(requests))

    async def worker() -> None:
        for _ in left:
            await ask(stack, rng, told)

    await asyncio.gather(*(worker() for _ in range(at_once)))


class Books:
    """What a stack holds, as its broker and its metrics tell it."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._redis = redis.Redis(port=stack.ports()["redis"], decode_responses=True)

    def close(self) -> None:
        """Let go of the broker."""
        self._redis.close()

    def memory(self) -> dict[str, int]:
        """Read resident memory of every instance, and what Redis has in use for data, in bytes."""
        found = {name: size for name, size in self._stack.rss_bytes().items() if name != "redis"}
        return {**found, "redis data": int(self._redis.info("memory")["used_memory"])}

    def left(self) -> dict[str, Any]:
        """Name what should not be there when nothing runs; empty when all is well."""
        found = self.left_in_broker()
        for instance, port in self._stack.ports().items():
            for name in GAUGES.get(instance.partition("-")[0], ()):
                if value := read_gauge(port, name):
                    found[f"{instance} {name}"] = value
        return found

    def left_in_broker(self) -> dict[str, Any]:
        """Name keys and entries that should not be there when nothing runs."""
        keys = list(self._redis.scan_iter(count=1000))
        of_requests = sorted(key for key in keys if not KEPT.match(key))
        entries = {key: size for key in keys if EMPTIED.search(key) and (size := self._redis.xlen(key))}
        found: dict[str, Any] = {}
        if of_requests:
            found["keys"] = [len(of_requests), *of_requests[:3]]
        if entries:
            found["entries"] = entries
        return found


def settle(left: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Wait until nothing is left; give what is when the time is over."""
    deadline = time.monotonic() + QUIET_LIMIT_S
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def read_gauge(port: int, name: str) -> float:
    """Sum the samples of a gauge of one instance, those with a label if one is named.

    Raises:
        LookupError: it has no such gauge.
    """
    name, _, label = name.rstrip("}").partition("{")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        rows = answer.read().decode().splitlines()
    rows = [row for row in rows if re.split(r"[{ ]", row, maxsplit=1)[0] == name and label in row]
    if not rows:
        raise LookupError(f"port {port} has no gauge {name}")
    return sum(float(row.rpartition(" ")[2]) for row in rows)


def growth(samples: list[dict[str, int]]) -> dict[str, float]:
    """Compare the last sample with the first, by part; the first was taken after a tenth of the requests."""
    return {name: round(samples[-1][name] / samples[0][name] - 1, 4) for name in samples[0]}


def soak(requests: int, at_once: int, seed: int) -> dict[str, Any]:
    """Launch, load, look; give the figures."""
    rng, told, samples = random.Random(seed), Told(), []
    flags = {"engine": "fake", "fake-step-ms": STEP_MS, "max-running-requests": at_once, "idle-reply": IDLE_REPLY_S}
    with Stack(*(word for name, value in flags.items() for word in (f"--{name}", str(value)))) as stack:
        books, began = Books(stack), time.monotonic()
        for _ in range(10):
            asyncio.run(ask_many(stack, requests // 10, at_once, rng, told))
            settle(books.left_in_broker)
            samples.append(books.memory())
        seconds = time.monotonic() - began
        left = settle(books.left)
        samples.append(books.memory())
        books.close()
    return {
        "requests": requests, "seconds": round(seconds, 1), "whole": told.whole, "hung_up": told.hung_up,
        "wrong": [len(told.wrong), *told.wrong[:3]], "left": left, "growth": growth(samples),
        "mib": {name: [round(s[name] / 2**20, 1) for s in samples] for name in samples[0]},
    }  # fmt: skip


def main() -> int:
    """Soak, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(machine(), file=sys.stderr)
    result = soak(args.requests, args.at_once, args.seed)
    print(json.dumps(result))
    grown = {name: share for name, share in result["growth"].items() if share >= MAX_GROWTH}
    return 1 if grown or result["left"] or result["wrong"][0] else 0


if __name__ == "__main__":
    sys.exit(main())
