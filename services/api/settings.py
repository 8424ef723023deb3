"""The api's own settings, on top of those every service has. Built in `__main__`, passed down, read nowhere else."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from shared.settings import CommaList, ServiceSettings


def _split_keys(value: object) -> object:
    """Turn "name=key, key" into ("name=key", "key"); the part before `=` names the tenant."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


KeyList = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split_keys)]


class ApiSettings(ServiceSettings):
    """What the api can be told.

    Attributes:
        host: address the HTTP server listens on.
        port: its port; 0 takes any free one and logs it.
        api_workers: processes that share the port; each is a replica of its own.
        api_reuse_port: listen beside other processes on the same port; set by the parent of workers.
        api_keys: `key` or `name=key`, with commas between; empty serves without keys.
        api_keys_file: the same, one per line; lines that begin with # are comments. Behind a key may stand limits of
            its own: `name=key concurrency=8 requests=600 tokens=100000`. It is read again whenever it changes.
        key_concurrency: requests that one key may have under way at once; 0 is no limit, here and below.
        key_requests_per_minute: requests that one key may start per minute.
        key_tokens_per_minute: tokens, of prompts and answers, that one key may use per minute.
        metrics_key: when set, /metrics wants it as a bearer token.
        disable_page: answer 404 for the page at `/`; /v1/pipeline, which it shows, stays.
        cors_origins: origins that browsers may call from; empty answers no preflight.
        max_body_bytes: largest request body; a larger one is refused with 413.
        max_tokenize_bytes: largest body of /tokenize and /detokenize.
        max_header_bytes: largest head of a request.
        max_inflight_bytes: bodies of all unfinished requests of this replica together.
        max_json_depth: nesting of the free-form parts of a body (tools, template arguments).
        max_queued_requests: choices that may wait, per model, beyond those that run; more get a 429.
        max_queued_tokens: prompt tokens that may wait in the engines' queues of a model.
        max_choices: prompts times n of one request.
        max_unsent_bytes: text held for a client that reads slowly; beyond it the reply log is the buffer.
        slow_client_timeout: seconds a client may take no byte before its stream is cut.
        header_timeout: seconds a client may take to send the head of a request, once it has begun.
        body_timeout: seconds a client may take to send its body.
        keep_alive: seconds an idle HTTP connection is kept.
        sse_comment_interval: seconds of silence after which a stream gets a comment line.
        resume_for: seconds a stream that can be resumed waits for its client, and is kept after its end.
        missing_grace: seconds a service may be away (a restart) before new requests are refused.
        no_engine_timeout: seconds a running request waits for an engine, or for the broker, before it ends with a 503.
        max_timeout: largest deadline a client may ask for, seconds.
        repair_after: seconds an unfinished reply may be silent before its log is looked at.
        reopen_after: seconds a request may be held by nobody before it is opened again.
    """

    host: str = "0.0.0.0"  # a container's clients come from outside of it
    port: int = Field(default=8000, ge=0, le=65535)
    api_workers: int = Field(default=1, ge=1, le=64)
    api_reuse_port: bool = False
    api_keys: KeyList = ()
    api_keys_file: Path | None = None
    key_concurrency: int = Field(default=0, ge=0)
    key_requests_per_minute: int = Field(default=0, ge=0)
    key_tokens_per_minute: int = Field(default=0, ge=0)
    metrics_key: SecretStr | None = None
    disable_page: bool = False
    cors_origins: CommaList = ()
    max_body_bytes: int = Field(default=16 << 20, ge=1024, le=1 << 30)
    max_tokenize_bytes: int = Field(default=1 << 20, ge=1024, le=1 << 26)
    max_header_bytes: int = Field(default=64 << 10, ge=4096, le=1 << 20)
    max_inflight_bytes: int = Field(default=256 << 20, ge=1 << 20)
    max_json_depth: int = Field(default=64, ge=4, le=256)
    max_queued_requests: int = Field(default=1024, ge=1, le=1_000_000)
    max_queued_tokens: int = Field(default=8_000_000, ge=1)
    max_choices: int = Field(default=2048, ge=1, le=2048)
    max_unsent_bytes: int = Field(default=1 << 20, ge=4096)
    slow_client_timeout: float = Field(default=120.0, gt=0)
    header_timeout: float = Field(default=30.0, gt=0)
    body_timeout: float = Field(default=60.0, gt=0)
    keep_alive: int = Field(default=90, ge=1, le=3600)
    sse_comment_interval: float = Field(default=15.0, gt=0, le=300)
    resume_for: float = Field(default=60.0, ge=0.1, le=3600)
    missing_grace: float = Field(default=8.0, ge=0)
    no_engine_timeout: float = Field(default=60.0, ge=1)
    max_timeout: float = Field(default=86_400.0, gt=0)
    repair_after: float = Field(default=2.0, gt=0)
    reopen_after: float = Field(default=15.0, gt=0)

    @field_validator("api_keys_file")
    @classmethod
    def _readable(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(f"no such file: {value}")
        return value
