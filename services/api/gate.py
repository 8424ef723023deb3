"""What every HTTP request passes: request id, size of its head, API key, the last resort for errors, the books.

A plain ASGI layer around the app, so that it costs nothing per chunk and sees every answer, the framework's own
included. Knows no route but those that need no key.
"""

import logging
import re
import secrets
import time
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.auth import ANYBODY, Tenant, same_key
from services.api.error_body import error_response, to_body
from services.api.routes.health import PUBLIC_PATHS
from services.api.routes.page import PAGE_PATHS
from services.api.service import ApiService
from shared.errors import InvalidRequest, MillraceError, NotAuthorized
from shared.logs import request_context

log = logging.getLogger(__name__)

_REQUEST_ID: Final = re.compile(rb"^[A-Za-z0-9._:@/+=-]{1,128}$")
CLIENT_CLOSED: Final = 499
"""Status of the log and the metrics, never of an answer: the client left before it was complete."""
UNMATCHED: Final = "unmatched"
_ASKED_OFTEN: Final = PUBLIC_PATHS | {"/metrics", "/v1/pipeline"}


class Gate:
    """The outermost layer of one replica's app."""

    def __init__(self, app: ASGIApp, service: ApiService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        answer = _Answer(send)
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["headers"] = answer.headers
        given = headers.get(b"x-request-id")
        valid = given is None or _REQUEST_ID.match(given) is not None
        request_id = given.decode() if given and valid else f"req-{secrets.token_hex(12)}"
        answer.request_id = request_id.encode()
        with request_context(request_id=request_id):
            try:
                if not valid:
                    raise InvalidRequest("X-Request-Id: up to 128 of A-Z a-z 0-9 . _ : @ / + = -", param="X-Request-Id")
                self._check_spelling(scope)
                tenant = self._admit(scope["path"], headers)
                state.update(request_id=request_id, tenant=tenant, began=began)
                await self._app(scope, receive, answer.send)
            except ClientDisconnect:
                answer.complete = False  # what the framework answers then, nobody hears
            except Exception as e:
                await self._fail(e, answer, scope, receive)
            self._book(scope, answer, began)

    def _check_spelling(self, scope: Scope) -> None:
        """Refuse two keys in one request: whoever reads another one than we do would let a stranger in.

        Raises:
            NotAuthorized: two Authorization headers.
        """
        if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:
            raise NotAuthorized("more than one Authorization header", code="ambiguous_authorization")

    def _admit(self, path: str, headers: dict[bytes, bytes]) -> Tenant:
        """Check the key; paths are compared as they are routed, so no spelling goes round it.

        Raises:
            NotAuthorized: no key, or not ours.
        """
        authorization = headers.get(b"authorization")
        settings = self._service.settings
        if path in PUBLIC_PATHS or path in PAGE_PATHS:
            return ANYBODY
        if path == "/metrics":
            key = settings.metrics_key
            if key is not None and not same_key(key.get_secret_value(), authorization):
                raise NotAuthorized("the metrics key is not valid")
            return ANYBODY
        return self._service.keys.tenant(authorization)

    async def _fail(self, error: Exception, answer: "_Answer", scope: Scope, receive: Receive) -> None:
        """Answer an error that nobody else did; after the first byte there is nothing left to say."""
        if not isinstance(error, MillraceError):
            log.exception("a request failed")
        if answer.status:
            raise error
        self._service.metrics.error(to_body(error))
        await error_response(error)(scope, receive, answer.send)

    def _book(self, scope: Scope, answer: "_Answer", began: float) -> None:
        route = getattr(scope.get("route"), "path", UNMATCHED)
        status = answer.status if answer.complete else CLIENT_CLOSED
        self._service.metrics.http_requests.labels(route, str(status)).inc()
        level = logging.DEBUG if route in _ASKED_OFTEN else logging.INFO
        log.log(level, "%s %s %d %.0f ms", scope["method"][:16], route, status, (time.monotonic() - began) * 1e3)


class _Answer:
    """Passes an answer on: adds the request id to its head, and remembers how far it came."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.request_id = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0
        self.complete = False

    async def send(self, message: Message) -> None:
        """Send a message of the app."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.request_id), *self.headers]
        await self._send(message)
        if not message.get("more_body", True) or (
            message["type"] == "http.response.body" and "more_body" not in message
        ):
            self.complete = True
