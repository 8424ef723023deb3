"""How every service writes its log: one line per record, as text or JSON, with the request it belongs to.

Owns the format, the escaping (a value from a client can never begin a new line or move the cursor) and the
redaction of secrets. Log messages never carry prompt or output text: callers see to that. A record names its
request by `extra={"uid": ..., "request_id": ...}` or by `request_context`, which also reaches other tasks' lines.
"""

import contextlib
import contextvars
import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final, TextIO

from pydantic import BaseModel, SecretStr

from shared.keys import Role
from shared.settings import ServiceSettings

FIELDS: Final = ("uid", "request_id")
"""Record attributes that are printed when they are there; pass them with `extra`."""

_UVICORN_LOGGERS: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET_SHAPES: Final = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/]*@"), r"\1***@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{4,}"), r"\1 ***"),
)
_MIN_SECRET_LEN: Final = 4

_context: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("millrace_log_context")


@contextlib.contextmanager
def request_context(*, uid: str = "", request_id: str = "") -> Iterator[None]:
    """Name the request in every line that is logged inside, in this task and those it starts."""
    given = {key: value for key, value in (("uid", uid), ("request_id", request_id)) if value}
    token = _context.set({**_context.get({}), **given})
    try:
        yield
    finally:
        _context.reset(token)


def escape(text: str) -> str:
    """Make text safe for one line of a log: control characters and line breaks become escapes."""
    return _CONTROL.sub(lambda m: m.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text)


class Redactor:
    """Replaces secrets by `***`: those it was told, and what looks like a password in a URL or a bearer token."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted({s for s in secrets if len(s) >= _MIN_SECRET_LEN}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        """Give the text without its secrets."""
        if self._known is not None:
            text = self._known.sub("***", text)
        for shape, replacement in _SECRET_SHAPES:
            text = shape.sub(replacement, text)
        return text


class _Formatter(logging.Formatter):
    """What the two formats share: the message with its traceback, redacted, and the request's fields."""

    def __init__(self, service: str, redact: Redactor) -> None:
        super().__init__()
        self._service = service
        self._redact = redact

    def _text(self, record: logging.LogRecord) -> tuple[str, str]:
        trace = record.exc_text or (self.formatException(record.exc_info) if record.exc_info else "")
        if record.stack_info:
            trace = f"{trace}\n{record.stack_info}" if trace else record.stack_info
        return self._redact(record.getMessage()), self._redact(trace)

    def _fields(self, record: logging.LogRecord) -> dict[str, str]:
        fields = dict(_context.get({}))
        fields.update((key, str(getattr(record, key))) for key in FIELDS if getattr(record, key, ""))
        return fields


class TextFormatter(_Formatter):
    """`2026-01-31T12:00:00.000Z INFO  tokenizer-0 logger: message uid=... request_id=...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line; a traceback follows indented, its own lines escaped one by one."""
        message, trace = self._text(record)
        fields = "".join(f" {key}={escape(value)}" for key, value in self._fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {self._service} {record.name}: {escape(message)}{fields}"
        return line + "".join(f"\n    {escape(part)}" for part in trace.splitlines())


class JsonFormatter(_Formatter):
    """One JSON object per line; a traceback is one string in it."""

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        message, trace = self._text(record)
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": message,
            **self._fields(record),
        }
        if trace:
            entry["trace"] = trace
        return json.dumps(entry, ensure_ascii=True)


def setup_logs(role: Role, settings: ServiceSettings, stream: TextIO | None = None) -> None:
    """Send all logs of this process, uvicorn's included, to one stream in one format.

    Args:
        role: of the service; names the line if the instance has no name.
        settings: format, level and the secrets that must not be printed (each SecretStr field, at any depth).
        stream: where to write; stderr by default.
    """
    stream = stream or sys.stderr
    as_text = settings.log_format == "text" or (settings.log_format == "auto" and stream.isatty())
    formatter = TextFormatter if as_text else JsonFormatter
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(settings.instance_name(role), Redactor(_secrets(settings))))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _UVICORN_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    for name in ("httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


def _secrets(settings: ServiceSettings) -> Iterator[str]:
    """Find every secret of the settings, also the one in a file and those of lists."""
    for value in _leaves(settings):
        yield value.get_secret_value()
    password = settings.read_redis_password()
    if password:
        yield password


def _leaves(value: object) -> Iterator[SecretStr]:
    if isinstance(value, SecretStr):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _leaves(getattr(value, name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _leaves(item)


def _time(record: logging.LogRecord) -> str:
    """Give the record's time in UTC with milliseconds."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
