"""How every failure looks to a client: OpenAI's `{"error": {message, type, param, code}}`, with the right status.

Owns the translation of our error tree, of the web framework's errors and of terminals found in a reply log.
Knows nothing of requests or streams. No answer carries a stack trace, a file path or a secret.
"""

import math
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.api.limits import KeyLimited
from shared.errors import (
    BrokerError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    ServerFault,
    Unavailable,
    UnsupportedMedia,
)
from shared.messages import ErrorBody

BROKER_RETRY_S: Final = 2.0
"""What a client is told to wait when the broker is away."""
RETRYABLE: Final = (429, 503)

_BY_STATUS: Final[dict[int, type[RequestError]]] = {
    400: InvalidRequest,
    404: NotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
    415: UnsupportedMedia,
    422: InvalidRequest,
    503: Unavailable,
}


class EndedWithError(RequestError):
    """A request that ended with an error its reply log tells: status, type and words come from there."""

    def __init__(self, body: ErrorBody) -> None:
        super().__init__(body.message, param=body.param, code=body.code)
        self.body = body


def to_body(error: BaseException) -> ErrorBody:
    """Translate an exception; what is not ours says nothing of its insides."""
    if isinstance(error, EndedWithError):
        return error.body
    if isinstance(error, RequestError):
        return ErrorBody(error.status, error.message, error.type, error.code, error.param)
    if isinstance(error, BrokerError):
        return to_body(Unavailable("the message broker is not reachable; try again", code="broker_unavailable"))
    if isinstance(error, HTTPException):
        return to_body(from_http_exception(error))
    return to_body(ServerFault("an internal error occurred"))


def from_http_exception(error: HTTPException) -> RequestError:
    """Translate an error of the web framework (unknown path, wrong method)."""
    if error.status_code == 404:
        return NotFound("no such path", code="not_found")
    if error.status_code == 405:
        return MethodNotAllowed("this path does not take that method", code="method_not_allowed")
    kind = _BY_STATUS.get(error.status_code, InvalidRequest if error.status_code < 500 else ServerFault)
    return kind(str(error.detail))


def encode_error(body: ErrorBody) -> bytes:
    """Write the JSON of an error."""
    return msgspec.json.encode(
        {"error": {"message": body.message, "type": body.type, "param": body.param, "code": body.code}}
    )


def error_headers(error: BaseException) -> dict[str, str]:
    """Give the headers that belong to an error: when to come back, which methods, how to authenticate."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    if isinstance(error, KeyLimited):
        headers.update(error.headers)
    body = to_body(error)
    if body.status in RETRYABLE:
        wait = error.retry_after_s if isinstance(error, RequestError) else None
        headers["retry-after"] = str(max(1, math.ceil(BROKER_RETRY_S if wait is None else wait)))
    if body.status == 401:
        headers["www-authenticate"] = "Bearer"
    if body.status == 413:
        headers["connection"] = "close"
    return headers


def error_response(error: BaseException) -> Response:
    """Make the HTTP answer of an exception."""
    body = to_body(error)
    return Response(encode_error(body), body.status, error_headers(error), "application/json")
