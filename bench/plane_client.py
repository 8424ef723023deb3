"""Streaming clients that cost next to nothing: bare sockets on one event loop, one regular expression per read.

Each stream asks for a completion, reads it to its end, and asks again on the same connection. What it saw is kept
as it came, and looked at only when the load is over. Runs in a process of its own (`run_clients`).
"""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import numpy.typing as npt
import uvloop

from services.scheduler.fake_stamps import read_ages_ns

_TEXT: Final = re.compile(rb'"text":"([^"]+)"')
_END: Final = b"0\r\n\r\n"
_RAMP_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients of one process do.

    Attributes:
        host, port, model: of the api.
        streams: at the same time.
        max_tokens: of one answer.
    """

    host: str
    port: int
    model: str
    streams: int
    max_tokens: int


@dataclass(slots=True)
class Seen:
    """What the clients of one process saw between two moments.

    Attributes:
        tokens: that came.
        chunks: events with text.
        reads: times a socket was read.
        ages_ns: of every fourth token, from its step to its being read.
        ttft_ns: from a request to its first token.
        errors: answers that were not what was asked for.
    """

    tokens: int = 0
    chunks: int = 0
    reads: int = 0
    ages_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    ttft_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    errors: list[str] = field(default_factory=list)


class _Answer:
    """One answer as it came: the text, and per read (wall clock, tokens, chunks)."""

    __slots__ = ("asked_ns", "reads", "texts")

    def __init__(self) -> None:
        self.asked_ns = time.time_ns()
        self.texts: list[bytes] = []
        self.reads: list[tuple[int, int, int]] = []


class _Stream(asyncio.Protocol):
    """One connection that asks again and again."""

    def __init__(self, load: Load, number: int) -> None:
        body = {
            "model": load.model, "prompt": f"stream {number}", "max_tokens": load.max_tokens, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        text = json.dumps(body).encode()
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {load.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n\r\n"
        ).encode() + text
        self._max_tokens = load.max_tokens
        self._tail = b""
        self._answered = False
        self._transport: asyncio.Transport | None = None
        self.answers: list[_Answer] = []
        self.errors: list[str] = []
        self.begun = asyncio.Event()
        self.stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]  # uvloop's are of no class of asyncio
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so, unless it was our wish."""
        if not self.stopping:
            self._fail(f"the connection is lost: {exc}")

    def data_received(self, data: bytes) -> None:
        """Note the tokens of whole events; what follows the last of them waits."""
        now = time.time_ns()
        if not self._answered:
            self._answered = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(data[-300:].decode(errors="replace"))
        if self._tail:
            data = self._tail + data
        end = data.rfind(b"\n\n") + 2
        if end == 1 and not data.endswith(_END):
            self._tail = data
            return
        texts = _TEXT.findall(data, 0, end)
        self._tail = data[end:]
        if texts:
            answer = self.answers[-1]
            if not answer.texts:
                self.begun.set()
            text = texts[0] if len(texts) == 1 else b"".join(texts)
            answer.texts.append(text)
            answer.reads.append((now, len(text), len(texts)))
        if data.endswith(_END):
            self._ended(data)

    def close(self) -> None:
        """Hang up."""
        self.stopping = True
        if self._transport is not None:
            self._transport.abort()

    def _ask(self) -> None:
        assert self._transport is not None
        self._tail = b""
        self._answered = False
        self.answers.append(_Answer())
        self._transport.write(self._request)

    def _ended(self, data: bytes) -> None:
        tokens = sum(read[1] for read in self.answers[-1].reads)
        if tokens != self._max_tokens:
            self._fail(f"{tokens} tokens instead of {self._max_tokens}: {data[-300:].decode(errors='replace')}")
        elif not self.stopping:
            self._ask()

    def _fail(self, reason: str) -> None:
        self.errors.append(reason)
        self.begun.set()


def run_clients(load: Load, pipe: Connection) -> None:
    """Run the clients of one process; its main function.

    Sends "ready" when every stream has its first token; then waits for two wall clock times in ns, from and to,
    hangs up, and sends what was seen between them.
    """
    uvloop.run(_run(load, pipe))


async def _run(load: Load, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    streams = [_Stream(load, number) for number in range(load.streams)]
    for start in range(0, load.streams, _RAMP_AT_ONCE):
        some = streams[start : start + _RAMP_AT_ONCE]
        await asyncio.gather(*(loop.create_connection(lambda s=s: s, load.host, load.port) for s in some))  # type: ignore[misc]
        await asyncio.gather(*(stream.begun.wait() for stream in some))
    pipe.send("ready")
    since_ns, until_ns = await loop.run_in_executor(None, pipe.recv)
    for stream in streams:
        stream.close()
    pipe.send(_look_at(streams, since_ns, until_ns))


def _look_at(streams: list[_Stream], since_ns: int, until_ns: int) -> Seen:
    seen, ages, ttft = Seen(), [], []
    for stream in streams:
        seen.errors += stream.errors
        for answer in stream.answers:
            if not answer.reads:
                continue
            reads = np.array(answer.reads, np.int64)
            at = reads[:, 0]
            within = (at >= since_ns) & (at < until_ns)
            seen.tokens += int(reads[within, 1].sum())
            seen.chunks += int(reads[within, 2].sum())
            seen.reads += int(within.sum())
            if within[0]:
                ttft.append(int(at[0]) - answer.asked_ns)
            token_at = np.repeat(at, reads[:, 1])
            in_time = (token_at >= since_ns) & (token_at < until_ns)
            age = read_ages_ns(b"".join(answer.texts), token_at)
            ages.append(age[in_time[: len(age) * 4 : 4]])
    seen.ages_ns = np.concatenate(ages) if ages else seen.ages_ns
    seen.ttft_ns = np.array(ttft, np.int64)
    return seen
