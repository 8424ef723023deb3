"""The cheap client of the plane's bench counts what came, however the bytes were cut."""

import asyncio
from typing import Any

import numpy as np
import pytest

from bench.plane import _figures, _spread
from bench.plane_client import Load, Seen, _look_at, _Stream

LOAD = Load("h", 1, "m", streams=1, max_tokens=4)
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = b"".join(
    b'%x\r\ndata: {"choices":[{"index":0,"text":"%s"}]}\n\n\r\n' % (40, text) for text in (b"ab", b"c", b"d")
)
END = b'30\r\ndata: {"choices":[{"index":0,"text":""}]}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'


class Wire(asyncio.Transport):
    """A connection that remembers what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        pass


def open_stream() -> tuple[_Stream, Wire]:
    stream, wire = _Stream(LOAD, 7), Wire()
    stream.connection_made(wire)
    return stream, wire


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_tokens_are_counted_however_the_bytes_are_cut(size: int) -> None:
    stream, wire = open_stream()
    stream.data_received(HEAD)
    data = ANSWER + END
    for at in range(0, len(data), size):
        stream.data_received(data[at : at + size])
    assert stream.errors == []
    assert b"".join(stream.answers[0].texts) == b"abcd"
    assert sum(tokens for _, tokens, _ in stream.answers[0].reads) == 4
    assert sum(chunks for _, _, chunks in stream.answers[0].reads) == 3
    assert len(wire.written) == 2, "it asks again on the same connection"


def test_a_short_answer_is_an_error() -> None:
    stream, _ = open_stream()
    stream.data_received(HEAD)
    stream.data_received(ANSWER.replace(b'"ab"', b'"a"') + END)
    assert "3 tokens instead of 4" in stream.errors[0]


def test_a_refusal_is_an_error() -> None:
    stream, _ = open_stream()
    stream.data_received(b'HTTP/1.1 429 Too Many Requests\r\n\r\n{"error":{}}')
    assert "429" in stream.errors[0]
    assert stream.begun.is_set(), "whoever waits for the first token is not left waiting"


def test_only_what_was_seen_in_time_counts() -> None:
    stream, _ = open_stream()
    stream.answers[0].texts = [b"0000", b"0000"]
    stream.answers[0].reads = [(100, 4, 2), (200, 4, 1)]
    seen = _look_at([stream], 150, 250)
    assert (seen.tokens, seen.chunks, seen.reads, len(seen.ages_ns)) == (4, 1, 1, 1)


def test_figures_are_per_token() -> None:
    seen = [Seen(tokens=100, chunks=50, reads=50), Seen(tokens=300, chunks=150, reads=100)]
    figures = _figures(seen, {"api": 0.004}, {"api": 2**20}, wall_s=2.0)
    assert figures["tokens_per_s"] == 200.0
    assert figures["cpu_us_per_token"] == {"api": 10.0}
    assert (figures["tokens_per_chunk"], figures["chunks_per_read"]) == (2.0, 1.33)
    assert _spread([np.array([1_000_000, 3_000_000])])["p50"] == 2.0
