"""Clients that leave, do not read, wait long, or send too much."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from shared.messages import GenerateRequest
from tests.api.conftest import HOST, RunningApi, StartApi
from tests.api.engine_side import MODEL, Answer, EngineSide, words
from tests.redis_keys import find_keys
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100_000}


def endless(request: GenerateRequest) -> Answer:
    return Answer([" word"] * 100_000)


def request_bytes(body: dict[str, Any], path: str = CHAT) -> bytes:
    data = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(api: RunningApi, body: dict[str, Any], *, receive_buffer: int = 0) -> socket.socket:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    sock.connect((HOST, api.port))
    sock.sendall(request_bytes(body))
    return sock


def hang_up(sock: socket.socket, how: str) -> None:
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def nothing_is_left(api: RunningApi, engine: EngineSide) -> bool:
    keys = [k for k in find_keys(engine.broker) if b":reply:" in k]
    return not keys and not engine.running and api.service.admission.num_choices == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_leaving_between_tokens(api: RunningApi, engine: EngineSide, how: str, stream: bool) -> None:
    engine.script = endless
    sock = connect(api, {**LONG, "stream": stream, "n": 2})
    eventually(lambda: [r for r in engine.running.values() if r.said > 3], "tokens are said")
    began = time.monotonic()
    hang_up(sock, how)
    eventually(lambda: nothing_is_left(api, engine), "all of it is gone")
    assert list(engine.ended.values()) == ["refused", "refused"]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_the_queue(api: RunningApi, engine: EngineSide, stream: bool) -> None:
    engine.reading.clear()
    sock = connect(api, {**LONG, "stream": stream})
    eventually(lambda: api.service.replies.choices, "the request is queued")
    uid = next(iter(api.service.replies.choices))
    hang_up(sock, "close")
    eventually(lambda: api.service.admission.num_choices == 0, "the api let go of it")
    eventually(lambda: not [k for k in find_keys(engine.broker) if b":reply:" in k], "its log is gone")
    engine.reading.set()
    eventually(lambda: engine.queued, "the tokenizer met it")
    assert uid not in engine.running


def test_leaving_in_prefill(api: RunningApi, engine: EngineSide) -> None:
    engine.hold()
    sock = connect(api, {**LONG, "stream": True})
    eventually(lambda: engine.running, "it was launched")
    hang_up(sock, "close")
    eventually(lambda: api.service.admission.num_choices == 0, "the api let go of it")
    engine.release()
    eventually(lambda: nothing_is_left(api, engine), "all of it is gone")


def test_a_client_that_reads_late_gets_everything(start_api: StartApi, engine: EngineSide) -> None:
    """Its text does not pile up in the api: what the buffer has no room for waits in the log."""
    api = start_api(max_unsent_bytes=4096)
    api.wait_ready()
    pieces = [f" {i:020000d}" for i in range(400)]
    engine.script = lambda request: words(request) if request.params.max_tokens == 1 else Answer(pieces, "stop")
    sock = connect(api, {**LONG, "stream": True}, receive_buffer=4096)
    eventually(lambda: engine.ended, "all of it was said", timeout_s=60)
    exchange = next(iter(api.service.replies.exchanges))
    assert exchange.unsent_bytes < 128 * 1024
    assert exchange.lagging
    other = api.post(CHAT, {**LONG, "max_tokens": 1})
    assert other.status_code == 200
    raw = b""
    while b"data: [DONE]\n\n" not in raw[-64:]:
        raw += sock.recv(1 << 20)
    sock.close()
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b'data: {"')]
    chunks = [msgspec.json.decode(event) for event in events]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "".join(pieces)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_client_that_never_reads_is_cut(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(slow_client_timeout=0.5, max_unsent_bytes=4096)
    api.wait_ready()
    engine.script = lambda request: Answer([" " + "x" * 20_000] * 100_000)
    sock = connect(api, {**LONG, "stream": True}, receive_buffer=4096)
    eventually(lambda: engine.ended, "it was ended", timeout_s=60)
    eventually(lambda: nothing_is_left(api, engine), "all of it is gone")
    raw = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 20):
            raw += part
    sock.close()
    assert b"[DONE]" not in raw


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    raw = b""
    while mark not in raw:
        part = sock.recv(65536)
        assert part, raw
        raw += part
    return raw


def test_silence_is_filled_with_comments(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(sse_comment_interval=0.3)
    api.wait_ready()
    engine.hold()
    sock = connect(api, {**LONG, "max_tokens": 2, "stream": True})
    raw = read_until(sock, b": keep-alive\n\n")
    assert b"200 OK" in raw
    engine.release()
    raw = read_until(sock, b"[DONE]")
    sock.close()


def test_a_deadline(api: RunningApi, engine: EngineSide) -> None:
    engine.hold()
    for answer in (
        api.post(CHAT, {**LONG, "timeout": 0.2}),
        api.post(CHAT, {**LONG, "stream": True}, headers={"X-Request-Timeout": "0.2"}),
    ):
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
    engine.release()
    eventually(lambda: nothing_is_left(api, engine), "all of it is gone")


def test_a_deadline_in_mid_stream(api: RunningApi, engine: EngineSide) -> None:
    engine.script = endless
    raw = api.post(CHAT, {**LONG, "stream": True, "timeout": 1.0}).content
    assert b'"code":"deadline_exceeded"' in raw
    assert b"[DONE]" not in raw


def test_bodies_over_the_bound(start_api: StartApi, engine: EngineSide) -> None:
    api = start_api(max_body_bytes=100_000)
    api.wait_ready()
    fits = {**LONG, "max_tokens": 1, "messages": [{"role": "user", "content": "a" * 90_000}]}
    assert api.post(CHAT, fits).status_code == 200
    over = msgspec.json.encode({**LONG, "messages": [{"role": "user", "content": "a" * 200_000}]})

    def parts() -> Iterator[bytes]:
        for at in range(0, len(over), 10_000):
            yield over[at : at + 10_000]

    json = {"content-type": "application/json"}
    assert httpx.post(api.url + CHAT, content=parts(), headers=json).status_code == 413
    sock = socket.create_connection((HOST, api.port), timeout=20)
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10737418240\r\n\r\n")
    raw = read_until(sock, b"}}")
    assert b"413" in raw.splitlines()[0]
    assert sock.recv(1) == b""
    sock.close()


def test_heads_over_the_bound(api: RunningApi) -> None:
    for head in (
        b"X-A: " + b"a" * 100_000 + b"\r\n\r\n",
        b"X-A: b\r\n" * 40_000 + b"\r\n",
        b"X-A: " + b"a" * 1_000_000,
    ):
        sock = socket.create_connection((HOST, api.port), timeout=20)
        try:
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + head)
            raw = read_until(sock, b"}}")
            assert raw.startswith(b"HTTP/1.1 400")
        except (ConnectionResetError, BrokenPipeError):
            pass  # closed while we were still sending, which is as good
        sock.close()
    assert api.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "begun", [b"2\r\n{}\r\n0\r\n", b"2;x=", b"2\r\n{}\r\n0\r\nX: "], ids=["trailers", "extension", "trailer"]
)
def test_what_is_no_body_is_bounded_too(api: RunningApi, begun: bytes) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    part = b"X-Name: value\r\n" * 500 if begun.endswith(b"0\r\n") else b"a" * 8000
    with socket.create_connection((HOST, api.port), timeout=20) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(head + begun)
        for _ in range(2000):
            sock.sendall(part)
        pytest.fail("the api takes all of it")
    assert api.get("/livez").status_code == 200


def test_requests_sent_ahead_are_answered_in_order_and_bounded(api: RunningApi, engine: EngineSide) -> None:
    one = b"GET /v1/models/%d HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((HOST, api.port), timeout=20) as sock:
        sock.sendall(b"".join(one % i for i in range(100)))
        raw = read_until(sock, b"`99` does not exist")
        places = [raw.index(b"`%d` does" % i) for i in range(100)]
        assert places == sorted(places)
    engine.hold()
    with socket.create_connection((HOST, api.port), timeout=20) as sock:
        sock.sendall(request_bytes(LONG))
        eventually(lambda: engine.running, "it was launched")
        sock.sendall(b"".join(one % i for i in range(200)))
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b"", "nothing of ours is taken for the answer to the first"
    eventually(lambda: api.service.admission.num_choices == 0, "the api let go of it")
    engine.release()


@pytest.mark.parametrize("begun", [b"", b"GET /livez HTTP/1.1\r\nHost: x\r\nX-A: b\r\n\r\n"])
def test_heads_that_come_too_slowly(start_api: StartApi, begun: bytes) -> None:
    """The time runs from a head's first byte, on a new connection and on one that was kept."""
    api = start_api(header_timeout=0.5)
    with socket.create_connection((HOST, api.port), timeout=20) as sock:
        if begun:
            sock.sendall(begun)
            assert b"200 OK" in read_until(sock, b"}")
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        raw = read_until(sock, b"}}")
        assert raw.startswith(b"HTTP/1.1 400") and b"did not come within" in raw
        assert sock.recv(1) == b""


def test_a_connection_on_which_nothing_comes_is_closed(start_api: StartApi) -> None:
    api = start_api(keep_alive=1)
    with socket.create_connection((HOST, api.port), timeout=20) as sock:
        assert sock.recv(1) == b""


def test_a_connection_is_kept_after_an_early_error(api: RunningApi, engine: EngineSide) -> None:
    sock = socket.create_connection((HOST, api.port), timeout=20)
    sock.sendall(request_bytes({**LONG, "max_tokens": 1}, path="/v1/nope"))
    assert b"404" in read_until(sock, b"}}").splitlines()[0]
    for _ in range(2):
        sock.sendall(request_bytes({**LONG, "max_tokens": 1}))
    assert read_until(sock, b'"usage"').count(b"200 OK") >= 1
    sock.close()


def test_many_streams_share_few_connections_to_the_broker(api: RunningApi, engine: EngineSide) -> None:
    engine.script = lambda request: Answer([f" {request.prompt_ids[0]}"] * 5, "stop")
    results: dict[int, str] = {}

    def ask(k: int) -> None:
        body = {"model": MODEL, "prompt": [k], "max_tokens": 5}
        results[k] = api.post("/v1/completions", body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: f" {k}" * 5 for k in range(100)}
