"""Whether a service lives and is ready, and the small server that says so to probes and to Prometheus.

`Readiness` and `Pulse` are plain objects that any thread may use; the api answers its own probe routes from
them, every other service starts a `HealthServer`. Liveness is of the process alone: it never depends on the
broker or on another service, only on the service's own loop coming round.
"""

import errno
import json
import logging
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from shared.errors import ConfigError
from shared.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)

_PORT_TRIES: Final = 100
_SOCKET_TIMEOUT_S: Final = 5.0


class Readiness:
    """What a service still waits for, by name. Ready when nothing is missing. Thread-safe.

    Names are for people: `broker`, `model`, `engine`, `draining`. A part is either set by `missing`/`have`,
    or asked each time through `require`.
    """

    def __init__(self, *missing: str) -> None:
        self._lock = threading.Lock()
        self._missing: dict[str, None] = dict.fromkeys(missing)
        self._checks: dict[str, Callable[[], bool]] = {}
        self._started = False

    def missing(self, part: str) -> None:
        """Say that a part is not there."""
        with self._lock:
            self._missing[part] = None

    def have(self, part: str) -> None:
        """Say that a part is there."""
        with self._lock:
            self._missing.pop(part, None)

    def require(self, part: str, check: Callable[[], bool]) -> None:
        """Have a part asked for at every look; `check` must be quick and safe on any thread."""
        with self._lock:
            self._checks[part] = check

    def started(self) -> None:
        """Say that starting is over: from here on `/startupz` is content."""
        self._started = True

    @property
    def has_started(self) -> bool:
        """Whether starting is over."""
        return self._started

    def what_is_missing(self) -> list[str]:
        """Name what is missing now, in a stable order."""
        with self._lock:
            checks = dict(self._checks)
            names = list(self._missing)
        return names + [name for name, check in checks.items() if name not in names and not check()]

    @property
    def ready(self) -> bool:
        """Whether nothing is missing."""
        return not self.what_is_missing()

    def body(self) -> dict[str, Any]:
        """Give what `/readyz` answers: {"ready": bool, "missing": [names]}."""
        missing = self.what_is_missing()
        return {"ready": not missing, "missing": missing}


class Pulse:
    """Counts how often a loop came round, and how long ago that was. `beat` is called by that loop alone.

    Until the first beat nothing is expected, so a long start is not taken for a stuck loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = 0.0
        self.count = 0

    def beat(self) -> None:
        """Say that the loop came round. Costs well under a microsecond."""
        self._last = self._clock()
        self.count += 1

    def rest(self) -> None:
        """Expect no beats until the next one: the loop is over, or does something that may take long."""
        self._last = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 while none is expected."""
        last = self._last
        return self._clock() - last if last else 0.0


class HealthServer:
    """Threaded HTTP server of a service: /livez /startupz /readyz /health /metrics /version.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes any.
        strict: raise if the port is taken; otherwise the next free one is used.
        metrics: what `/metrics` prints.
        readiness: what `/readyz` and `/startupz` answer from.
        version: answered by `/version`.
        alive: whether the process still does its work; must not depend on anything outside of it.

    Raises:
        ConfigError: the port is taken (and `strict`), or no port near it is free, or the host is not ours.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        strict: bool,
        metrics: Metrics,
        readiness: Readiness,
        version: str,
        alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._metrics = metrics
        self._readiness = readiness
        self._version = version
        self._alive = alive
        self._server = self._bind(host, port, strict)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)

    @property
    def port(self) -> int:
        """The port it really listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more and free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Give status, media type and body for a path."""
        if path == "/livez":
            alive = self._alive()
            return _json(200 if alive else 503, {"alive": alive})
        if path == "/startupz":
            started = self._readiness.has_started
            return _json(200 if started else 503, {"started": started, "missing": self._readiness.what_is_missing()})
        if path in ("/readyz", "/health"):
            body = self._readiness.body()
            return _json(200 if body["ready"] else 503, body)
        if path == "/metrics":
            return 200, CONTENT_TYPE, self._metrics.render()
        if path == "/version":
            return _json(200, {"version": self._version})
        return _json(404, {"error": "not found"})

    def _bind(self, host: str, port: int, strict: bool) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"health": self})
        for candidate in [port] if strict or port == 0 else range(port, min(port + _PORT_TRIES, 65536)):
            try:
                server = _Server((host, candidate), handler)
            except OSError as e:
                if e.errno == errno.EADDRINUSE and not strict:
                    continue
                raise ConfigError(f"MILLRACE_HEALTH_PORT: cannot listen on {host}:{candidate}: {e.strerror}") from e
            if port and candidate != port:
                log.warning("port %d is taken, the health server listens on %d", port, candidate)
            return server
        raise ConfigError(f"MILLRACE_HEALTH_PORT: no free port at or above {port}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A probe that hangs up is nobody's error."""
        log.debug("health request from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    health: HealthServer
    timeout = _SOCKET_TIMEOUT_S
    server_version = "millrace"
    sys_version = ""

    def do_GET(self) -> None:
        status, media_type, body = self.health.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("health: %s", format % args)


def _json(status: int, body: dict[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(body).encode()
