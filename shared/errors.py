"""Every error that crosses a module boundary, in one tree.

MillraceError
  ConfigError          a setting or a model cannot be served; the start stops with its reason
  BrokerError          the broker cannot be used
    BrokerDown         ... right now: drop what is held, back off, come back
      BrokerFull       ... because its memory is full
  WireError            bytes that are no message of ours
  RequestError         one request fails, with a status, a type and a code that its client reads
    InvalidRequest, ContextLengthExceeded, ModelNotFound, NotAuthorized, NotFound, PayloadTooLarge,
    UnsupportedMedia, MethodNotAllowed, RateLimited, DeadlineExceeded, Unavailable, ServerFault
"""

from typing import ClassVar, Self


class MillraceError(Exception):
    """Root of all errors of the project."""


class ConfigError(MillraceError):
    """A setting, a model folder or a checkpoint that cannot be served as asked."""


class BrokerError(MillraceError):
    """The broker answered with something that no retry will cure."""


class BrokerDown(BrokerError):
    """The broker is away, loading, read-only or full: what was sent may or may not have happened."""


class BrokerFull(BrokerDown):
    """The broker is out of memory: it refuses what would need more, and answers everything else."""


class WireError(MillraceError):
    """Bytes that do not decode as the message that belongs there."""


class RequestError(MillraceError):
    """One request fails; nothing else does.

    Attributes:
        status: HTTP status.
        type: OpenAI's error type.
        code: machine-readable reason, or None.
        retry_after_s: seconds after which another try is worth it, or None.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request itself is wrong; `param` names the field."""

    status = 400
    type = "invalid_request_error"

    @classmethod
    def of_field(cls, param: str, reason: str, code: str = "invalid_value") -> Self:
        """Refuse one field: its name is in front of the reason."""
        return cls(f"{param}: {reason}", param=param, code=code)


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the model's context, or the cache of the engine."""

    default_code = "context_length_exceeded"


class NotAuthorized(RequestError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class NotFound(RequestError):
    """No such path or object."""

    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    """The model asked for is not served here."""

    default_code = "model_not_found"


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method."""

    status = 405
    type = "invalid_request_error"


class PayloadTooLarge(RequestError):
    """The body is over its bound."""

    status = 413
    type = "invalid_request_error"


class UnsupportedMedia(RequestError):
    """The body is not JSON."""

    status = 415
    type = "invalid_request_error"


class RateLimited(RequestError):
    """The queue is full, or a key is over its limits; `retry_after_s` is measured."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"


class ServerFault(RequestError):
    """Our fault: the request was accepted and could not be answered."""

    default_code = "internal_error"


class Unavailable(RequestError):
    """The service cannot take requests now: no broker, no engine, or it is shutting down."""

    status = 503
    type = "service_unavailable_error"
    default_code = "unavailable"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before it was answered."""

    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"
