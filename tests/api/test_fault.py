"""A part of a replica dies: the replica says so, ends, and is started again by whoever started it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from services.api.app import create_app
from services.api.janitor import Janitor
from services.api.server import serve
from services.api.service import ApiService
from services.api.settings import ApiSettings


def test_a_replica_of_which_a_task_died_ends_as_a_fault(
    api_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def die(self: Janitor) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Janitor, "run", die)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(serve, ApiSettings(**api_settings)).result(60) == 1


def test_liveness_tells_that_a_task_died(api_settings: dict[str, Any]) -> None:
    async def ask(service: ApiService) -> httpx.Response:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            return await client.get("/livez")

    async def look() -> list[int]:
        service = ApiService(ApiSettings(**api_settings))
        before = await ask(service)
        service.faulted = True
        return [before.status_code, (await ask(service)).status_code]

    assert asyncio.run(look()) == [200, 503]
