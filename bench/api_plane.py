"""What a token costs the api: CPU time of one api process per token, over many streams at once.

A scripted engine side appends one token per stream and flush through the real scripts, at a set rate, and a
client process reads all streams. Run: `python -m bench.api_plane [--streams 256] [--tokens 200] [--rate 8000]`.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from services.launcher.redis_server import RedisServer, find_programs
from shared.broker import streams
from shared.broker.append import Item, Terminal, append
from shared.broker.connection import Broker
from shared.broker.control import beat_and_look
from shared.broker.log_id import LogId, make_end_id, make_log_id
from shared.broker.replies import fence
from shared.keys import APPEND_CAP
from shared.messages import Delta, FenceHeader, GenerateRequest, Heartbeat, TokenizeRequest, decode, encode
from shared.settings import RedisSettings

MODEL = "bench"


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_ready(port: int, limit_s: float = 60.0) -> None:
    """Wait until the api says that it serves."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError("the api does not get ready")


class Pump:
    """Says one token to every stream, round after round."""

    def __init__(self, settings: RedisSettings, tokens: int, rate: float) -> None:
        self.broker = Broker(settings)
        self.tokens, self.rate = tokens, rate
        self.name = f"engine-{secrets.token_hex(4)}"
        self.done = threading.Event()

    def beats(self) -> None:
        """Beat for all three services, until `done`."""
        count = 0
        while not self.done.wait(0.3):
            count += 1
            for role in ("tokenizer", "scheduler", "detokenizer"):
                beat = Heartbeat(count, role, model=MODEL, max_running=4096, max_seq_len=100_000)
                self.broker.run(beat_and_look(self.broker.keys, role, self.name, beat, (role,)))

    def accept(self, wanted: int) -> list[tuple[str, str, bytes, int]]:
        """Take requests until all streams are there; gives uid, replica, entry, attempt."""
        keys, found = self.broker.keys, {}
        replica = ""
        while len(found) < wanted:
            for entry in self.broker.run(streams.read_queue(keys, MODEL, self.name, count=64, block_ms=100)):
                request = decode(TokenizeRequest, entry.payload)
                ready = [GenerateRequest(uid, [1, 2, 3], request.params) for uid in request.uids]
                self.broker.run(streams.move(keys, MODEL, entry.entry_id, self.name, ready))
            for entry in self.broker.run(streams.read_generate(keys, self.name, count=4096)):
                if entry.uid not in found:
                    head = FenceHeader(self.name, entry.entry_id.decode(), 3)
                    call = fence(
                        keys, entry.uid, self.name, entry.entry_id, secrets.token_hex(4), "new", head, solo=True
                    )
                    found[entry.uid] = (entry.entry_id, self.broker.run(call).attempt)
        alive = self.broker.run(beat_and_look(keys, "detokenizer", self.name, Heartbeat(0, "d"), ("api",)))["api"]
        replica = next(iter(alive))
        return [(uid, replica, entry, attempt) for uid, (entry, attempt) in found.items()]

    def pump(self, running: list[tuple[str, str, bytes, int]]) -> None:
        """Say all tokens at the set rate."""
        last: dict[str, LogId] = {uid: make_log_id(attempt, 0) for uid, _, _, attempt in running}
        pause = len(running) / self.rate
        due = time.monotonic()
        for said in range(1, self.tokens + 1):
            items = []
            for uid, replica, entry, attempt in running:
                ends = said == self.tokens
                delta = Delta(said, [said], " word", finish="length" if ends else None, stamp_ns=time.time_ns())
                log_id = make_end_id(said) if ends else make_log_id(attempt, said)
                end = Terminal(self.name, entry, 60_000) if ends else None
                items.append(Item(uid, last[uid], log_id, encode(delta), replica, end))
                last[uid] = log_id
            for at in range(0, len(items), APPEND_CAP):
                self.broker.run(append(self.broker.keys, items[at : at + APPEND_CAP]))
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))


async def read_streams(port: int, count: int, tokens: int, result: "multiprocessing.Queue[tuple[int, float]]") -> None:
    """Read all streams, counting their chunks and seconds."""
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": tokens}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % len(body) + body)
        raw = b""
        while b"[DONE]" not in raw[-64:]:
            raw += await reader.read(65536)
        writer.close()
        return raw.count(b"data: {")

    began = time.monotonic()
    chunks = await asyncio.gather(*(one() for _ in range(count)))
    result.put((sum(chunks), time.monotonic() - began))


def clients(port: int, count: int, tokens: int, result: "multiprocessing.Queue[tuple[int, float]]") -> None:
    """Run the readers, in a process of their own."""
    asyncio.run(read_streams(port, count, tokens, result))


def main() -> None:
    """Measure once and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=8000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        redis = RedisServer(find_programs()[0], Path(directory))
        redis.start()
        port = free_port()
        settings = RedisSettings(redis_url=redis.url, redis_prefix="bench")
        told = {"REDIS_URL": redis.url, "REDIS_PREFIX": "bench", "SERVED_MODEL_NAME": MODEL, "PORT": str(port)}
        environment = {**os.environ, **{f"MILLRACE_{k}": v for k, v in told.items()}, "MILLRACE_LOG_LEVEL": "warning"}
        api = subprocess.Popen([sys.executable, "-m", "services.api"], env=environment)
        pump = Pump(settings, options.tokens, options.rate)
        heart = threading.Thread(target=pump.beats)
        heart.start()
        try:
            wait_ready(port)
            result: multiprocessing.Queue[tuple[int, float]] = multiprocessing.Queue()
            reader = multiprocessing.Process(target=clients, args=(port, options.streams, options.tokens, result))
            reader.start()
            running = pump.accept(options.streams)
            process = psutil.Process(api.pid)
            before = sum(process.cpu_times()[:2])
            began = time.monotonic()
            pump.pump(running)
            chunks, _ = result.get(timeout=60)
            spent, seconds = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
            count = options.streams * options.tokens
            print(f"{count} tokens in {seconds:.2f} s ({count / seconds:.0f}/s), {count / chunks:.2f} per chunk")
            each = f"{spent / count * 1e6:.1f} us per token, {spent / chunks * 1e6:.1f} per chunk"
            print(f"api: {spent:.2f} s of CPU, {each}")
            reader.join()
        finally:
            pump.done.set()
            heart.join()
            api.terminate()
            api.wait(30)
            redis.stop()


if __name__ == "__main__":
    main()
