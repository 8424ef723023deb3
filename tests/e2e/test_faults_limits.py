"""Deadlines, bounded queues, and requests that are too large: an answer with the right status, and nothing left."""

import json
import socket
from collections.abc import Iterator

import psutil
import pytest
from openai import OpenAI, RateLimitError

from tests.e2e.faults.crowd import Client, Crowd, wait_begun
from tests.e2e.faults.quiet import total, wait_quiet
from tests.e2e.faults.sockets import connect, encode
from tests.e2e.faults.stacks import launched
from tests.e2e.stack import Json, Stack
from tests.waiting import eventually


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One slot, four places in the queue, five hundred prompt tokens in it; a prompt takes 2 ms per token."""
    flags = ("--max-running-requests", "1", "--max-queued-requests", "4", "--max-queued-tokens", "500")
    time = ("--fake-step-ms", "20", "--fake-token-us", "2000", "--max-prefill-tokens", "64", "--cache", "naive")
    with launched(tmp_path_factory.mktemp("narrow"), *flags, *time) as stack:
        yield stack


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pool of 512 tokens under a context of 8192."""
    pool = ("--num-pages", "32", "--page-size", "16", "--fake-step-ms", "2")
    with launched(tmp_path_factory.mktemp("small"), *pool) as stack:
        yield stack


def body(stack: Stack, num_tokens: int, prompt: str = "x", **more: object) -> Json:
    return stack.complete_body(prompt, max_tokens=num_tokens, ignore_eos=True, **{"stream": True, **more})


def is_late(error: Json | None) -> bool:
    return error is not None and error["code"] == "deadline_exceeded"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_in_the_queue_is_a_504(narrow: Stack, stream: bool) -> None:
    wait_quiet(narrow, texts=False)
    with Crowd() as crowd:
        runner = crowd.ask(narrow, [body(narrow, 4000)])
        wait_begun(runner)
        drawn = total(narrow, "scheduler", "millrace_fences_total", answer="ok")
        late = crowd.ask(narrow, [body(narrow, 5, stream=stream, timeout=0.5)])
        crowd.wait(late)
        assert total(narrow, "scheduler", "millrace_fences_total", answer="ok") - drawn <= 1
        assert not runner[0].over.is_set()
        crowd.leave(*runner)
    assert late[0].status == 504
    assert is_late(late[0].error)
    wait_quiet(narrow, texts=False)


@pytest.mark.slow
def test_a_deadline_while_the_prompt_is_computed_is_a_504(narrow: Stack) -> None:
    wait_quiet(narrow, texts=False)
    with Crowd() as crowd:
        late = crowd.send([Client(narrow.url, body(narrow, 5, "p" * 4000), {"X-Request-Timeout": "0.7"})])
        eventually(lambda: narrow.running() == 1, "it runs")
        crowd.wait(late)
    assert late[0].status == 504
    assert is_late(late[0].error)
    wait_quiet(narrow, texts=False)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_between_tokens_ends_the_answer_with_an_error(narrow: Stack, stream: bool) -> None:
    wait_quiet(narrow, texts=False)
    with Crowd() as crowd:
        late = crowd.ask(narrow, [body(narrow, 4000, stream=stream, timeout=1.5)])
        crowd.wait(late)
    assert is_late(late[0].error)
    assert not late[0].done
    assert late[0].status == (200 if stream else 504)
    assert bool(late[0].text) == stream
    wait_quiet(narrow, texts=False)


@pytest.mark.slow
def test_more_requests_than_the_queue_holds(narrow: Stack) -> None:
    """Five of twenty are served, the others are told when to come back, before any byte of a stream."""
    wait_quiet(narrow, texts=False)
    for _ in range(2):
        with Crowd() as crowd:
            clients = crowd.ask(narrow, [body(narrow, 25, stream=number % 2 == 0) for number in range(20)])
            crowd.wait(clients)
        served = [c for c in clients if c.status == 200]
        refused = [c for c in clients if c.status != 200]
        assert len(served) == 5
        assert all(c.done and len(c.text) == 25 for c in served)
        assert {c.status for c in refused} == {429}
        assert all(c.error is not None and c.error["type"] == "rate_limit_error" for c in refused), refused[0].error
        assert all(1 <= int(c.headers["retry-after"]) <= 60 for c in refused)
        assert {c.headers["content-type"] for c in refused} == {"application/json"}
        wait_quiet(narrow, texts=False)


@pytest.mark.slow
def test_places_of_those_who_left_are_free_again(narrow: Stack) -> None:
    wait_quiet(narrow, texts=False)
    with Crowd() as crowd:
        for _ in range(3):
            clients = crowd.ask(narrow, [body(narrow, 4000, stream=number % 2 == 0) for number in range(5)])
            eventually(lambda: total(narrow, "api", "millrace_requests_in_flight") == 5, "all five are in")
            refused = crowd.ask(narrow, [body(narrow, 5)])
            crowd.wait(refused)
            assert refused[0].status == 429
            crowd.leave(*clients)
            wait_quiet(narrow, texts=False)
        last = crowd.ask(narrow, [body(narrow, 5)] * 5)
        crowd.wait(last)
    assert all(c.done for c in last)


@pytest.mark.slow
def test_more_prompt_tokens_than_may_wait(narrow: Stack) -> None:
    wait_quiet(narrow, texts=False)
    with Crowd() as crowd:
        runner = crowd.ask(narrow, [body(narrow, 4000)])
        wait_begun(runner)
        waiting = crowd.ask(narrow, [body(narrow, 5, "w" * 600)])
        eventually(lambda: total(narrow, "scheduler", "millrace_queued_tokens") > 500, "its tokens wait")
        probes: list[Client] = []

        def is_refused() -> bool:
            probe = crowd.ask(narrow, [body(narrow, 5)])[0]
            eventually(lambda: probe.over.is_set() or total(narrow, "api", "millrace_requests_in_flight") == 3, "asked")
            crowd.leave(probe)
            probes.append(probe)
            eventually(lambda: total(narrow, "api", "millrace_requests_in_flight") == 2, "let go")
            return probe.status == 429

        eventually(is_refused, "the api has heard of the tokens that wait", 20, every_s=0.1)
        assert probes[-1].error is not None
        assert "tokens" in probes[-1].error["message"]
        assert int(probes[-1].headers["retry-after"]) >= 1
        crowd.leave(*runner)
        crowd.wait(waiting)
    assert waiting[0].done
    wait_quiet(narrow, texts=False)


@pytest.mark.slow
def test_the_openai_client_raises_what_one_expects(narrow: Stack) -> None:
    wait_quiet(narrow, texts=False)
    client = OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=0)
    with Crowd() as crowd:
        clients = crowd.ask(narrow, [body(narrow, 4000)] * 5)
        eventually(lambda: total(narrow, "api", "millrace_requests_in_flight") == 5, "all five are in")
        with pytest.raises(RateLimitError):
            client.completions.create(model=narrow.model, prompt="x", max_tokens=5)
        crowd.leave(*clients)
    wait_quiet(narrow, texts=False)
    assert client.completions.create(model=narrow.model, prompt="x", max_tokens=5).usage is not None


@pytest.mark.slow
def test_a_request_larger_than_the_cache_blocks_nobody(small: Stack) -> None:
    with Crowd() as crowd:
        huge = crowd.ask(small, [body(small, 5, "h" * 600, stream=False)])
        fits = crowd.ask(small, [body(small, 5)])
        long = crowd.ask(small, [body(small, 200, "l" * 400, stream=False)])
        crowd.wait([*huge, *fits, *long])
    assert huge[0].status == 400
    assert huge[0].error is not None
    assert huge[0].error["code"] == "context_length_exceeded"
    assert fits[0].done and len(fits[0].text) == 5
    assert long[0].status == 400 or long[0].finish == ["length"]
    assert small.complete("x", max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    wait_quiet(small)


@pytest.mark.slow
def test_bodies_without_end_do_not_fill_the_memory(small: Stack) -> None:
    """What is too long is read and thrown away; what is far too long, or compressed, is not even read."""
    api = psutil.Process(small.pids()["api-0"])
    before = api.memory_info().rss
    part = b"a" * (1 << 20)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    assert status_of(small, head + f"Content-Length: {64 << 20}\r\n\r\n", [part] * 64) == 413
    chunk = b"%x\r\n%s\r\n" % (len(part), part)
    assert status_of(small, head + "Transfer-Encoding: chunked\r\n\r\n", [*[chunk] * 64, b"0\r\n\r\n"]) == 413
    assert status_of(small, head + f"Content-Length: {10 << 30}\r\n\r\n", []) == 413
    packed = head + "Content-Encoding: gzip\r\nContent-Length: 1000\r\n\r\n"
    assert status_of(small, packed, [b"\x1f\x8b" + bytes(998)]) in (400, 415)
    fits = small.chat_body("a" * (15 << 20), max_tokens=1)
    assert small.client.post("/v1/chat/completions", json=fits).status_code == 400
    assert api.memory_info().rss - before < 3 * (16 << 20) + (32 << 20)
    assert small.complete("x", max_tokens=1, ignore_eos=True)["usage"]["completion_tokens"] == 1


def status_of(stack: Stack, head: str, parts: list[bytes]) -> int:
    """Send a whole request before looking for its answer, as many clients do; give the answer's status."""
    with socket.create_connection(("127.0.0.1", stack.ports()["api-0"]), timeout=30) as sock:
        sock.sendall(head.encode())
        for part in parts:
            sock.sendall(part)
        return int(sock.recv(4096).split(b" ")[1])


@pytest.mark.slow
def test_clients_that_do_not_read_hold_nobody_up(small: Stack) -> None:
    more = {"logprobs": 5}
    socks = [connect(small, body(small, 300, f"{i}", **more), receive_buffer=4096) for i in range(8)]
    with Crowd() as crowd:
        normal = crowd.ask(small, [body(small, 50, "normal")])
        crowd.wait(normal)
    assert normal[0].done and len(normal[0].text) == 50
    late = b"".join(read_to_end(sock) for sock in socks[:4])
    assert late.count(b"data: [DONE]") == 4
    for sock in socks:
        sock.close()
    wait_quiet(small, texts=False)


def read_to_end(sock: socket.socket) -> bytes:
    """Read a stream; its texts must be one letter each."""
    raw = b""
    while b"data: [DONE]\n\n" not in raw[-100:]:
        part = sock.recv(1 << 16)
        assert part
        raw += part
    chunks = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b'data: {"')]
    assert sum(len(c["choices"][0]["text"]) for c in chunks) == 300
    return raw


@pytest.mark.slow
def test_one_connection_serves_hundreds_of_requests(small: Stack) -> None:
    for number in range(300):
        answer = small.complete(f"{number}", max_tokens=1, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 1
    with connect(small, body(small, 1, stream=False)) as sock:
        assert read_answer(sock)[0] == 200
        sock.sendall(encode({"model": small.model, "prompt": "x", "temperature": 9}))
        assert read_answer(sock)[0] == 400
        pipelined = encode(body(small, 1, stream=False)) + encode(body(small, 2, stream=False))
        sock.sendall(pipelined)
        first, second = read_answer(sock), read_answer(sock)
        assert [a[1]["usage"]["completion_tokens"] for a in (first, second)] == [1, 2]
        request = encode(body(small, 1, stream=False))
        head, _, data = request.partition(b"\r\n\r\n")
        sock.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 100")
        sock.sendall(data)
        assert read_answer(sock)[0] == 200


def read_answer(sock: socket.socket) -> tuple[int, Json]:
    """Read one whole answer, byte for byte no more."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        assert byte, head
        head += byte
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    data = b""
    while len(data) < length:
        data += sock.recv(length - len(data))
    return int(head.split(b" ")[1]), json.loads(data)
