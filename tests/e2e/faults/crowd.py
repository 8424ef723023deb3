"""Many clients at once, cheap enough for hundreds of streams beside the stack that serves them."""

import asyncio
import io
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress

import aiohttp

from tests.e2e.faults.loops import LoopThread
from tests.e2e.stack import Json, Stack
from tests.waiting import eventually

PATH = "/v1/completions"
LONG = {"2": -100, "0": -100}
"""Bans the end tokens of the embedded model, so that an answer has max_tokens tokens."""


class Client:
    """One request of a crowd, and all that its client has seen of the answer.

    Attributes:
        status: of the answer; 0 before its head.
        headers: of the answer.
        text: of the first choice, joined from all chunks (or of the whole answer).
        others: text of the further choices, by index.
        tokens: texts of single tokens, where log probabilities were asked for.
        finish: all finish reasons that were told.
        usage: as told.
        error: the error body: of the answer, or of an event of the stream.
        done: whether `[DONE]` came, or a whole answer.
        broken: the connection was cut.
        last_s: monotonic seconds of the last event.
        longest_gap_s: between two events.
        response_id: of the answer.
    """

    def __init__(self, url: str, body: Json, headers: dict[str, str] | None = None) -> None:
        self.url = url
        self.body = body
        self.given_headers = headers or {}
        self.status = 0
        self.headers: dict[str, str] = {}
        self.num_events = 0
        self.text = ""
        self.others: dict[int, str] = {}
        self.tokens: list[str] = []
        self.finish: list[str] = []
        self.usage: Json | None = None
        self.error: Json | None = None
        self.done = False
        self.broken = False
        self.began_s = self.last_s = 0.0
        self.longest_gap_s = 0.0
        self.response_id = ""
        self.over = threading.Event()

    @property
    def num_tokens(self) -> int:
        """Tokens as the server counted them."""
        assert self.usage is not None
        return int(self.usage["completion_tokens"])

    async def run(self, session: aiohttp.ClientSession, path: str) -> None:
        """Ask and listen to the end."""
        self.began_s = self.last_s = time.monotonic()
        try:
            headers = {"Content-Type": "application/json", **self.given_headers}
            data = io.BytesIO(json.dumps(self.body).encode())
            async with session.post(self.url + path, data=data, headers=headers) as response:
                self.headers = {k.lower(): v for k, v in response.headers.items()}
                self.status = response.status
                if self.status != 200 or not self.body.get("stream"):
                    self._take_whole(json.loads(await response.read()))
                    return
                async for line in response.content:
                    if line.startswith(b"data: "):
                        self._take(line[6:].strip())
        except (aiohttp.ClientError, ConnectionError):
            self.broken = True
        finally:
            self.over.set()

    def _take_whole(self, body: Json) -> None:
        self.error = body.get("error")
        if self.error is None:
            self._take_choices(body)
            self.usage = body["usage"]
            self.done = True

    def _take(self, data: bytes) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_s) if self.num_events else 0.0
        self.last_s = now
        self.num_events += 1
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        self._take_choices(event)
        self.usage = event.get("usage") or self.usage

    def _take_choices(self, event: Json) -> None:
        self.response_id = event["id"]
        for choice in event["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            if choice["index"] == 0:
                self.text += said.get("content") or ""
            else:
                self.others[choice["index"]] = self.others.get(choice["index"], "") + (said.get("content") or "")
            if choice["index"] == 0:
                self.tokens += (choice.get("logprobs") or {}).get("tokens", [])
            if choice["finish_reason"]:
                self.finish.append(choice["finish_reason"])


class Crowd:
    """Clients on an event loop of their own; use as a context."""

    def __init__(self) -> None:
        self._loop = LoopThread("crowd")
        self._session = self._loop.call(self._open_session())
        self._tasks: dict[Client, Future[None]] = {}

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call(self._close())
        self._loop.close()

    def send(self, clients: Sequence[Client], path: str = PATH) -> list[Client]:
        """Let clients ask, all at once."""
        for client in clients:
            self._tasks[client] = self._loop.begin(client.run(self._session, path))
        return list(clients)

    def ask(self, stack: Stack, bodies: Sequence[Json], *, urls: Sequence[str] = (), path: str = PATH) -> list[Client]:
        """Make clients of completion bodies and send them, to all apis in turn."""
        urls = urls or [stack.url]
        return self.send([Client(urls[i % len(urls)], body) for i, body in enumerate(bodies)], path)

    def leave(self, *clients: Client) -> None:
        """Let clients hang up."""
        for client in clients:
            self._tasks[client].cancel()

    def wait(self, clients: Sequence[Client], timeout_s: float = 120.0) -> None:
        """Wait until all are over."""
        deadline = time.monotonic() + timeout_s
        for client in clients:
            left = deadline - time.monotonic()
            assert client.over.wait(max(left, 0.01)), f"an answer is not over, after {client.num_events} events"
            with suppress(CancelledError):
                self._tasks[client].result(10)

    async def _open_session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def _close(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()


def wait_begun(clients: Sequence[Client], num_events: int = 3, timeout_s: float = 60.0) -> None:
    """Wait until every client has heard something, or has heard all."""
    eventually(lambda: all(c.num_events >= num_events or c.over.is_set() for c in clients), "all have begun", timeout_s)
    assert not any(c.error for c in clients), [c.error for c in clients if c.error][:1]


def wait_heard(clients: Sequence[Client], num_events: int, timeout_s: float = 60.0) -> None:
    """Wait until all clients together have heard so many events more."""
    before = sum(c.num_events for c in clients)
    eventually(
        lambda: sum(c.num_events for c in clients) >= before + num_events or all(c.over.is_set() for c in clients),
        f"{num_events} more events",
        timeout_s,
    )


def check_whole(clients: Sequence[Client], expected: Callable[[Client], str], num_tokens: int) -> None:
    """Check that every answer is complete and word for word what it would have been."""
    wrong = [c for c in clients if c.text != expected(c)]
    assert not wrong, f"{len(wrong)} of {len(clients)} differ: {wrong[0].text!r} for {expected(wrong[0])!r}"
    assert all(c.done and c.error is None for c in clients)
    assert all(c.finish == ["length"] for c in clients), {tuple(c.finish) for c in clients}
    assert {c.num_tokens for c in clients} == {num_tokens}
