"""Requests of all kinds at once, good ones and bad ones, until told to stop: what dashboards are drawn from."""

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import httpx

PREFIXES: Final = ("You are a patient teacher. " * 12, "Answer in one word. " * 6, "")
MAX_TOKENS: Final = 60
Json = dict[str, Any]


class MixedLoad:
    """A thread that keeps so many requests in flight.

    Attributes:
        told: outcome -> requests: the HTTP status, `hung up`, or `broken` where the connection was cut.
    """

    def __init__(self, url: str, model: str, at_once: int, *, seed: int = 0, room: int = 4000) -> None:
        """Prepare.

        Args:
            url: of the api.
            model: served by it.
            at_once: requests in flight.
            seed: of the choice of requests.
            room: characters of a prompt that certainly does not fit the model's context, where one is asked for.
        """
        self.told: Counter[str] = Counter()
        self._url = url
        self._model = model
        self._at_once = at_once
        self._room = room
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Finish what is in flight."""
        self._over.set()
        self._thread.join()

    @property
    def answered(self) -> int:
        """Requests answered well."""
        return self.told["200"]

    async def _run(self) -> None:
        async with httpx.AsyncClient(
            base_url=self._url, timeout=120, limits=httpx.Limits(max_connections=None)
        ) as client:
            await asyncio.gather(*(self._work(client) for _ in range(self._at_once)))

    async def _work(self, client: httpx.AsyncClient) -> None:
        kinds: list[tuple[Callable[[httpx.AsyncClient], Any], int]] = [
            (self._stream, 55), (self._whole, 25), (self._hang_up, 8), (self._unknown_model, 4), (self._bad_body, 4),
            (self._too_long, 2), (self._unknown_path, 2),
        ]  # fmt: skip
        while not self._over.is_set():
            [ask] = self._rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
            try:
                self.told[await ask(client)] += 1
            except httpx.TransportError:
                self.told["broken"] += 1
                await asyncio.sleep(0.1)

    def _body(self, **more: Any) -> Json:
        text = self._rng.choice(PREFIXES) + f"{self._rng.random()} " * self._rng.randint(1, 20)
        tokens = self._rng.randint(2, MAX_TOKENS)
        return {"model": self._model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}

    async def _stream(self, client: httpx.AsyncClient) -> str:
        async with client.stream("POST", "/v1/chat/completions", json=self._body(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and "error" in json.loads(line[6:]):
                    return "error event"
            return str(answer.status_code)

    async def _whole(self, client: httpx.AsyncClient) -> str:
        return str((await client.post("/v1/chat/completions", json=self._body(n=self._rng.randint(1, 3)))).status_code)

    async def _hang_up(self, client: httpx.AsyncClient) -> str:
        body = self._body(stream=True, max_tokens=400)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and self._rng.random() < 0.2:
                    return "hung up"
            return str(answer.status_code)

    async def _unknown_model(self, client: httpx.AsyncClient) -> str:
        return str((await client.post("/v1/chat/completions", json=self._body(model="another"))).status_code)

    async def _bad_body(self, client: httpx.AsyncClient) -> str:
        return str((await client.post("/v1/chat/completions", json=self._body(temperature=-1))).status_code)

    async def _too_long(self, client: httpx.AsyncClient) -> str:
        body = {"model": self._model, "prompt": "word " * self._room, "max_tokens": 4}
        return str((await client.post("/v1/completions", json=body)).status_code)

    async def _unknown_path(self, client: httpx.AsyncClient) -> str:
        return str((await client.get(f"/v1/{self._rng.randrange(10**9)}")).status_code)
