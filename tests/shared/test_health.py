import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from shared.errors import ConfigError
from shared.health import HealthServer, Pulse, Readiness
from shared.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def readiness() -> Readiness:
    return Readiness("start")


@pytest.fixture
def pulse() -> Pulse:
    return Pulse(Clock())


@pytest.fixture
def server(readiness: Readiness, pulse: Pulse) -> Iterator[HealthServer]:
    server = new_server(readiness=readiness, pulse=pulse)
    server.start()
    yield server
    server.stop()


def new_server(
    port: int = 0, *, strict: bool = False, readiness: Readiness | None = None, pulse: Pulse | None = None
) -> HealthServer:
    pulse = pulse or Pulse()
    return HealthServer(
        "127.0.0.1",
        port,
        strict=strict,
        metrics=Metrics("api", "api-0", "m", "0"),
        readiness=readiness or Readiness(),
        version="1.2.3",
        alive=lambda: pulse.age_s < 30,
    )


def get(server: HealthServer, path: str, method: str = "GET") -> tuple[int, str, bytes]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.headers["Content-Type"], e.read()


def test_readiness_names_what_is_missing(server: HealthServer, readiness: Readiness) -> None:
    up = False
    readiness.require("broker", lambda: up)
    status, media_type, body = get(server, "/readyz")
    assert (status, media_type, json.loads(body)) == (
        503,
        "application/json",
        {"ready": False, "missing": ["start", "broker"]},
    )
    up = True
    readiness.have("start")
    assert json.loads(get(server, "/readyz?verbose=1")[2]) == {"ready": True, "missing": []}
    assert get(server, "/health")[0] == 200
    readiness.missing("draining")
    assert (get(server, "/readyz")[0], readiness.ready) == (503, False)


def test_startup_is_over_once_and_for_all(server: HealthServer, readiness: Readiness) -> None:
    assert get(server, "/startupz")[0] == 503
    readiness.started()
    assert get(server, "/startupz")[0] == 200
    readiness.missing("broker")
    assert get(server, "/startupz")[0] == 200


def test_liveness_depends_on_the_loop_alone(server: HealthServer, readiness: Readiness, pulse: Pulse) -> None:
    clock = pulse._clock
    assert isinstance(clock, Clock)
    readiness.missing("broker")
    assert get(server, "/livez")[0] == 200
    clock.now += 1000
    assert get(server, "/livez")[0] == 200
    pulse.beat()
    clock.now += 29
    assert get(server, "/livez")[0] == 200
    clock.now += 2
    assert (get(server, "/livez")[0], pulse.age_s) == (503, 31)
    pulse.rest()
    assert (get(server, "/livez")[0], pulse.count) == (200, 1)


def test_other_paths(server: HealthServer) -> None:
    assert json.loads(get(server, "/version")[2]) == {"version": "1.2.3"}
    status, media_type, body = get(server, "/metrics")
    assert (status, media_type.split(";")[0]) == (200, "text/plain")
    assert b"millrace_service_info" in body
    assert get(server, "/nothing")[0] == 404
    assert get(server, "/livez", "HEAD")[2] == b""
    assert get(server, "/livez", "POST")[0] == 501


def test_a_client_that_says_nothing_holds_nobody_up(server: HealthServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server, "/livez")[0] == 200


def test_a_taken_port_is_stepped_over(server: HealthServer) -> None:
    second = new_server(server.port)
    assert server.port < second.port < server.port + 100
    second.stop()


def test_a_taken_port_is_an_error_when_that_is_asked_for(server: HealthServer) -> None:
    with pytest.raises(ConfigError, match=f"MILLRACE_HEALTH_PORT: cannot listen on 127.0.0.1:{server.port}"):
        new_server(server.port, strict=True)


def test_the_port_is_free_again_after_stop() -> None:
    first = new_server()
    first.start()
    port = first.port
    first.stop()
    second = new_server(port, strict=True)
    second.stop()


def test_readiness_may_be_used_from_many_threads(readiness: Readiness) -> None:
    def work(name: str) -> None:
        for _ in range(500):
            readiness.missing(name)
            readiness.what_is_missing()
            readiness.have(name)

    threads = [threading.Thread(target=work, args=(f"part {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert readiness.what_is_missing() == ["start"]
