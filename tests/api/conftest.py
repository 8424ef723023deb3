"""A real api (uvicorn in a thread, real Redis) with a scripted engine side."""

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from services.api.app import create_app
from services.api.server import Server, listen, make_config
from services.api.service import ApiService
from services.api.settings import ApiSettings
from services.launcher.redis_server import RedisServer
from shared.settings import RedisSettings
from tests.api.engine_side import MODEL, EngineSide
from tests.redis_keys import delete_keys
from tests.waiting import eventually

HOST = "127.0.0.1"


class RunningApi:
    """One replica that serves in a thread."""

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings
        sock = listen(settings)
        self.port: int = sock.getsockname()[1]
        self.service = ApiService(settings, port=self.port)
        self.server = Server(make_config(settings, create_app(self.service)), self.service)
        self._thread = threading.Thread(target=self.server.run, args=([sock],))
        self._thread.start()
        self.url = f"http://{HOST}:{self.port}"
        eventually(lambda: self.server.started, "the api listens")

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, **more)

    def wait_ready(self) -> None:
        eventually(lambda: self.get("/readyz").status_code == 200, "the api is ready")

    def stop(self) -> None:
        if not self.server.should_exit:
            self.service.drain()
            self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


StartApi = Callable[..., RunningApi]


@pytest.fixture
def api_settings(redis_server: RedisServer, prefix: str) -> dict[str, Any]:
    return {
        "host": HOST,
        "port": 0,
        "redis_url": redis_server.url,
        "redis_prefix": prefix,
        "served_model_name": MODEL,
        "drain_timeout": 3.0,
    }


@pytest.fixture
def start_api(api_settings: dict[str, Any]) -> Iterator[StartApi]:
    """Starts replicas of the test's own."""
    started: list[RunningApi] = []

    def start(**settings: Any) -> RunningApi:
        api = RunningApi(ApiSettings(**{**api_settings, **settings}))
        started.append(api)
        return api

    yield start
    for api in started:
        api.stop()


@pytest.fixture(scope="session")
def shared_pair(redis_server: RedisServer) -> Iterator[tuple[RunningApi, EngineSide]]:
    """A replica and an engine side for all tests that need nothing special of them."""
    redis = RedisSettings(redis_url=redis_server.url, redis_prefix=f"test-{uuid.uuid4().hex[:12]}")
    side = EngineSide(redis).start()
    told = {"redis_url": redis.redis_url, "redis_prefix": redis.redis_prefix, "served_model_name": MODEL}
    api = RunningApi(ApiSettings(host=HOST, port=0, drain_timeout=3.0, **told))
    api.wait_ready()
    yield api, side
    api.stop()
    side.stop()
    delete_keys(redis)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[EngineSide]:
    """An engine side of the test's own if it starts an api, else the shared one, idle before and after."""
    if {"start_api", "start_process"} & set(request.fixturenames):
        side = EngineSide(request.getfixturevalue("redis_settings")).start()
        yield side
        side.stop()
        return
    api, side = request.getfixturevalue("shared_pair")
    side.reset()
    yield side
    side.reset()
    eventually(lambda: not side.running and not api.service.replies.exchanges, "all requests are over")


@pytest.fixture
def api(engine: EngineSide, shared_pair: tuple[RunningApi, EngineSide]) -> RunningApi:
    """The shared replica, ready."""
    return shared_pair[0]
