"""Reads a request's body and headers within their bounds. Nothing here parses what a body means."""

import asyncio
import contextlib
import math
import re
from typing import Final

from starlette.requests import ClientDisconnect, Request

from services.api.schema import too_large
from services.api.settings import ApiSettings
from shared.errors import InvalidRequest, UnsupportedMedia

RESUME: Final = "X-Millrace-Resume"
_MAX_DRAINED: Final = 256 << 20
_DRAIN_S: Final = 10.0
"""What is read of a body that is too large, and thrown away: many clients look for an answer only when they have sent
all of it, and would see a broken connection in place of the reason."""
_TRACEPARENT: Final = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """Read the whole body.

    Raises:
        PayloadTooLarge: over the bound, by its length header or by what came.
        UnsupportedMedia: not JSON, or compressed.
        InvalidRequest: it did not come in time.
        ClientDisconnect: the client left.
    """
    headers = request.headers
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not accepted", code="unsupported_encoding")
    media = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise UnsupportedMedia("the body must be JSON (Content-Type: application/json)", code="unsupported_media_type")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18:
        raise too_large(settings.max_body_bytes)
    if int(length) > settings.max_body_bytes:
        if int(length) <= _MAX_DRAINED and "expect" not in headers:
            await _drain(request)
        raise too_large(settings.max_body_bytes)
    try:
        async with asyncio.timeout(settings.body_timeout):
            body = await _collect(request, settings.max_body_bytes)
    except TimeoutError as e:
        raise InvalidRequest("the body did not come in time", code="body_timeout") from e
    if body is None:
        await _drain(request)
        raise too_large(settings.max_body_bytes)
    return body


async def _drain(request: Request) -> None:
    """Read what is left of a body, as long as it does not take too long."""
    left = _MAX_DRAINED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while left > 0:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _collect(request: Request, limit: int) -> bytes | None:
    """Read a body; None when it is larger."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def read_timeout(request: Request, from_body: float | None) -> float | None:
    """Give the deadline in seconds: the shorter of the body's and the header's.

    Raises:
        InvalidRequest: the header is no positive number.
    """
    header = request.headers.get("x-request-timeout")
    if header is None:
        return from_body
    try:
        value = float(header)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise InvalidRequest("X-Request-Timeout: must be a positive number of seconds", param="X-Request-Timeout")
    return value if from_body is None else min(value, from_body)


def read_traceparent(request: Request) -> str:
    """Give the W3C trace context, or nothing if it is malformed."""
    value = request.headers.get("traceparent", "")
    return value if _TRACEPARENT.match(value) else ""


def wants_resume(request: Request) -> bool:
    """Whether the client asks for a stream that it can come back to.

    Raises:
        InvalidRequest: the header is neither 0 nor 1.
    """
    value = request.headers.get(RESUME, "0").strip()
    if value not in ("0", "1"):
        raise InvalidRequest.of_field(RESUME, "must be 0 or 1")
    return value == "1"
