"""One HTTP server process: uvicorn with our limits on what a connection may send, and our way to end.

Owns the listening socket, signals, the drain, and errors of connections that never become a request.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from types import FrameType
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.api.app import create_app
from services.api.error_body import encode_error, to_body
from services.api.service import ApiService
from services.api.settings import ApiSettings
from services.api.streaming import ABORT_EXTENSION
from shared import garbage
from shared.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)

BACKLOG: Final = 2048
MAX_PIPELINED: Final = 128
"""Requests of one connection that wait for the one before them."""
_TICK_S: Final = 0.05
_LAST_WORDS_S: Final = 0.25
"""How long connections may take to be read that were made when the listening socket was closed."""
_HARD_STOP_S: Final = 3
"""After the drain deadline every stream has been told; what has not left then is cut."""


class Connection(HttpToolsProtocol):
    """A connection whose head is bounded, whose broken requests get JSON, and which can be dropped.

    As bounded as the head is what else is no body: trailers, extensions of chunks. And so are the requests that a
    client sends without waiting for answers, since each of them takes far more memory than its bytes.
    """

    max_header_bytes = 64 << 10
    header_timeout = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin with a head; a connection on which nothing comes is closed like an idle one."""
        super().connection_made(transport)
        self._in_head = True
        self._bare_bytes = 0  # since the last byte of a body
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.timeout_keep_alive, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in, as long as the head, or what follows the body, is within its bound."""
        self._bare_bytes += len(data)
        super().data_received(data)
        if self._bare_bytes > self.max_header_bytes and not self.transport.is_closing():
            part = "head is" if self._in_head else "trailers are"
            self.send_400_response(f"the request's {part} larger than {self.max_header_bytes} bytes")

    def on_body(self, body: bytes) -> None:
        """Take a part of a body in."""
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        """Offer the request's handler to drop the connection."""
        super().on_message_begin()
        self._in_head = True
        self._bare_bytes = 0
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.header_timeout, self._head_is_late)
        self.scope["extensions"] = {ABORT_EXTENSION: self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head is too large."""
        self._in_head = False
        self._stop_head_timer()
        size = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        if size > self.max_header_bytes:
            raise ValueError("the head is too large")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")
        super().on_headers_complete()

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self.send_400_response(f"the request's head did not come within {self.header_timeout:g} seconds")

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, and close; without a word where it would be taken for another's answer."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if answering or self.pipeline:
            self.transport.close()
            return
        body = encode_error(to_body(InvalidRequest(msg, code="invalid_http")))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[400] + head + body)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server; the first signal drains and ends with 0, the second ends at once with 1.

    A replica of which a part has died drains too, and ends with 1: whoever started it starts it again.
    """

    def __init__(self, config: uvicorn.Config, service: ApiService) -> None:
        super().__init__(config)
        self._service = service
        self._parent = os.getppid() if service.settings.api_reuse_port else 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, or stop ending gently."""
        if self.should_exit:
            os._exit(1)
        self.should_exit = True
        self._service.drain()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End once nothing runs. Until then whoever comes is told to go elsewhere, and whoever has just come is heard.

        The listening socket is closed last: what waits there unread would be reset, without a word to its client.
        Workers on a shared port close theirs at once, so that their siblings get what is new.
        """
        until = self._service.drain_deadline + _HARD_STOP_S
        running = self._service.replies.exchanges
        while running and not self._parent and time.monotonic() < until:  # noqa: ASYNC110  # its end rings nowhere
            await asyncio.sleep(_TICK_S)
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        await asyncio.sleep(_LAST_WORDS_S)
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """End with the parent, as a worker alone would keep the port, and when a part of this replica has died."""
        orphaned = self._parent and os.getppid() != self._parent
        if not self.should_exit and (orphaned or self._service.faulted):
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)


def listen(settings: ApiSettings) -> socket.socket:
    """Bind the port.

    Raises:
        ConfigError: the address or the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.api_reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError as e:
        sock.close()
        raise ConfigError(f"MILLRACE_PORT: cannot listen on {settings.host}:{settings.port}: {e.strerror}") from e
    sock.set_inheritable(True)
    return sock


def make_config(settings: ApiSettings, app: Any) -> uvicorn.Config:
    """Set uvicorn up: fast parser and loop, no access log of its own, keep-alive above any proxy's."""
    bounds = {"max_header_bytes": settings.max_header_bytes, "header_timeout": settings.header_timeout}
    protocol = type("BoundConnection", (Connection,), bounds)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive,
        timeout_graceful_shutdown=int(settings.drain_timeout) + _HARD_STOP_S,
    )


def serve(settings: ApiSettings) -> int:
    """Serve until a signal ends it; gives the exit code.

    Raises:
        ConfigError: a setting cannot be had.
    """
    sock = listen(settings)
    port = sock.getsockname()[1]
    service = ApiService(settings, port=port)
    server = Server(make_config(settings, create_app(service)), service)
    log.info("listening on http://%s:%d", settings.host, port)
    garbage.settle()
    server.run(sockets=[sock])
    return 0 if server.started and not service.faulted else 1
