"""Clients that remember all they heard: every piece of every choice, when it came, and how it ended."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal

import aiohttp

from bench.chaos.workload import Ask

Outcome = Literal["open", "done", "error", "cut", "left"]

REFUSALS: Final = frozenset(
    {"broker_unavailable", "broker_full", "no_engine", "no_tokenizer", "no_detokenizer", "shutting_down", "queue_full"}
)
"""What a client is told before its request is accepted: it may come again, and nothing was promised."""
_RESUMABLE: Final = {"X-Millrace-Resume": "1"}
_PAUSE_S: Final = 0.2
_PATIENCE_S: Final = 90.0


class Client:
    """One request, asked again until it is accepted, and its answer.

    Attributes:
        ask: what it asks.
        outcome: how it ended.
        code: of the error it was told, or of the cut.
        status: of the answer; 0 before.
        api: place of the api in `urls` that accepted it.
        heard: choice -> pieces.
        tokens: as the server counted them; -1 untold.
        resumptions: times it came back to its stream.
        refusals: codes of the answers that sent it away for a while.
        longest_silence_s: between being asked, any two events, and the end.
        begun: it has heard something, or it is over.
        wrong: what is not as the wire format says.
    """

    def __init__(self, ask: Ask, urls: Sequence[str], first: int, *, slow_s: float = 0.0) -> None:
        self.ask = ask
        self._urls = urls
        self._slow_s = slow_s
        self.api = first
        self.outcome: Outcome = "open"
        self.code = ""
        self.status = 0
        self.heard: dict[int, list[str]] = {}
        self.tokens = -1
        self.resumptions = 0
        self.refusals: list[str] = []
        self.longest_silence_s = 0.0
        self.begun = asyncio.Event()
        self.wrong: list[str] = []
        self._finished: set[int] = set()
        self._last_s = 0.0
        self._events = 0
        self._response_id = ""
        self._event_id = ""

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Ask until accepted, then hear it out."""
        deadline = time.monotonic() + _PATIENCE_S
        try:
            while time.monotonic() < deadline:
                self._last_s = time.monotonic()
                await self._once(session)
                if self.outcome == "cut" and self._response_id and self.ask.resumes:
                    self.outcome, self.code = "open", ""
                    self.resumptions += 1
                if self.outcome != "open":
                    return
                await asyncio.sleep(_PAUSE_S)
                self.api = (self.api + 1) % len(self._urls)
        except asyncio.CancelledError:
            self.outcome = "left"
            raise
        finally:
            self.begun.set()

    async def _once(self, session: aiohttp.ClientSession) -> None:
        """Ask, or come back to what was begun."""
        self.status = 0
        try:
            async with self._request(session) as answer:
                self.status = answer.status
                if answer.status != 200 or not self.ask.streams:
                    self._take_whole(await answer.json())
                    return
                async for line in answer.content:
                    if line.startswith(b"id: "):
                        self._event_id = line[4:].strip().decode()
                    elif line.startswith(b"data: "):
                        self._take_event(line[6:].strip())
                        if self._slow_s:
                            await asyncio.sleep(self._slow_s)
                if self.outcome == "open":
                    self._end("cut", "cut")
        except aiohttp.ClientConnectorError:
            self.refusals.append("no connection")
        except (aiohttp.ClientError, ConnectionError):
            self._end("cut", "cut")

    def _request(self, session: aiohttp.ClientSession) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        base = self._urls[self.api]
        if self._response_id and self.ask.resumes:
            headers = {"Last-Event-ID": self._event_id} if self._event_id else {}
            return session.get(f"{base}/v1/streams/{self._response_id}", headers=headers)
        return session.post(base + self.ask.path, json=self.ask.body, headers=_RESUMABLE if self.ask.resumes else {})

    def _take_whole(self, body: Any) -> None:
        if "error" in body:
            code = str(body["error"].get("code"))
            if code in REFUSALS and (not self.heard or self.ask.resumes):
                self.refusals.append(code)
                return
            self._end("error", code)
            return
        self._take_choices(body["choices"])
        self.tokens = body["usage"]["completion_tokens"]
        self._end("done", "")

    def _take_event(self, data: bytes) -> None:
        self._note_silence()
        self._events += 1
        if self.outcome != "open":
            self.wrong.append(f"an event after the end: {data[:80]!r}")
        if self._events >= 3:
            self.begun.set()
        if data == b"[DONE]":
            self._end("done", "")
            return
        event = json.loads(data)
        if "error" in event:
            self._end("error", str(event["error"].get("code")))
            return
        self._response_id = event["id"]
        self._take_choices(event["choices"])
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]

    def _take_choices(self, choices: list[Any]) -> None:
        for choice in choices:
            index = choice["index"]
            if index in self._finished:
                self.wrong.append(f"choice {index} goes on after its finish reason")
            said = choice.get("delta") or choice.get("message") or choice
            logprobs = choice.get("logprobs") or {}
            if logprobs.get("tokens"):
                pieces = list(logprobs["tokens"])
            else:
                pieces = list(said.get("text") or said.get("content") or "")
            self.heard.setdefault(index, []).extend(pieces)
            if choice.get("finish_reason"):
                self._finished.add(index)

    def _note_silence(self) -> None:
        now = time.monotonic()
        self.longest_silence_s = max(self.longest_silence_s, now - self._last_s)
        self._last_s = now

    def _end(self, outcome: Outcome, code: str) -> None:
        self._note_silence()
        if self.outcome != "open":
            self.wrong.append(f"{outcome} {code} after {self.outcome} {self.code}".strip())
            return
        self.outcome, self.code = outcome, code
