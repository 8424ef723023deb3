"""The settings all services have in common, and how any settings class is read from the environment.

Owns the `MILLRACE_` prefix, the way a bad value is reported, and the fields of the broker, the model's name,
logs, health server and life cycle. Knows no service: each has a class of its own on top of these. Settings
are built once, in a service's `__main__`, and passed down; nothing else reads the environment.
"""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from shared.errors import ConfigError
from shared.keys import LEASE_S, Role

ENV_PREFIX: Final = "MILLRACE_"
DEFAULT_MODEL_NAME: Final = "smollm2-135m-instruct"
_SHOWN_CHARS: Final = 100
_SECRET: Final = re.compile("KEY|PASSWORD|SECRET|URL|ENDPOINT|USERNAME")
_URL_SCHEMES: Final = (
    "redis://",
    "rediss://",
    "unix://",
    "sentinel://",
    "sentinels://",
    "redis+sentinel://",
    "rediss+sentinel://",
)


def _split(value: Any) -> Any:
    """Turn "a, b" into ("a", "b"); leave lists as they are."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Field type of a list that is written with commas in its variable."""


class RedisSettings(BaseSettings):
    """How the broker is reached. A password set on its own may hold any character and wins over the URL's.

    Attributes:
        redis_url: redis://, rediss:// (TLS), unix:// or sentinel://host:port[,host:port]/service[/db].
        redis_prefix: in front of every key; two installations on one Redis differ in it.
        redis_password: as it is, not URL-encoded.
        redis_password_file: a file that holds the password (a mounted secret); its last line break is dropped.
        redis_ca_file: certificate authority for rediss://, instead of the system's.
        redis_sentinel_username: for the sentinels themselves, which often want none.
        redis_sentinel_password: likewise.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,
        populate_by_name=True,
        validate_default=True,
    )

    redis_url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    redis_prefix: str = Field(default="millrace", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._{}-]+$")
    redis_username: str | None = None
    redis_password: SecretStr | None = None
    redis_password_file: Path | None = None
    redis_ca_file: Path | None = None
    redis_sentinel_username: str | None = None
    redis_sentinel_password: SecretStr | None = None

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(_URL_SCHEMES):
            raise ValueError(f"must begin with one of {', '.join(_URL_SCHEMES)}")
        return value

    @field_validator("redis_ca_file", "redis_password_file")
    @classmethod
    def _exists(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(f"no such file: {value}")
        return value

    @model_validator(mode="after")
    def _one_password(self) -> "RedisSettings":
        if self.redis_password is not None and self.redis_password_file is not None:
            raise ValueError("MILLRACE_REDIS_PASSWORD and MILLRACE_REDIS_PASSWORD_FILE are both set")
        return self

    def read_redis_password(self) -> str | None:
        """Give the password to use, from the variable or the file; None leaves it to the URL.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.redis_password is not None:
            return self.redis_password.get_secret_value()
        if self.redis_password_file is None:
            return None
        try:
            return self.redis_password_file.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"MILLRACE_REDIS_PASSWORD_FILE: cannot be read: {e}") from e


class ServiceSettings(RedisSettings):
    """What every service of an installation has. Subclasses add fields and may change defaults.

    Attributes:
        name: of this instance, in logs, metrics and heartbeats; the same after a restart. Default: the host's name.
        served_model_name: what clients call the model; part of the model's keys, so all services must agree.
        health_host: address of the probe and metrics server.
        health_port: its port; 0 takes any.
        health_port_strict: fail when the port is taken, instead of taking the next free one.
        log_format: `auto` is text on a terminal, JSON elsewhere.
        lease: seconds after which an engine that stands still is taken to be dead.
        drain_timeout: seconds a service may take to finish after the first SIGTERM.
        otlp_endpoint: an OpenTelemetry collector (OTLP over HTTP, http://host:4318) that traces are sent to; empty
            sends none. OTEL_EXPORTER_OTLP_ENDPOINT says the same; its other OTEL_ variables count too.
    """

    name: str = Field(default="", max_length=128, pattern=r"^[A-Za-z0-9._-]*$")
    served_model_name: str = Field(default=DEFAULT_MODEL_NAME, min_length=1, max_length=256)
    health_host: str = "0.0.0.0"  # a container's probes come from outside of it
    health_port: int = Field(default=0, ge=0, le=65535)
    health_port_strict: bool = False
    log_format: Literal["auto", "text", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    lease: float = Field(default=LEASE_S["scheduler"], ge=1.0, le=600.0)
    drain_timeout: float = Field(default=30.0, ge=0.0, le=86_400.0)
    otlp_endpoint: str = Field(
        default="", validation_alias=AliasChoices("MILLRACE_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    )

    @field_validator("log_format", "log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value

    def instance_name(self, role: Role) -> str:
        """Name this instance: the setting, or `<role>-<host>`."""
        host = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())
        return self.name or f"{role}-{host}"

    def lease_s(self, role: Role) -> float:
        """Give the lease of a role: the setting for engines, fixed for the others."""
        return self.lease if role == "scheduler" else LEASE_S[role]


class ModelSettings(ServiceSettings):
    """For the services that read the model's files (all but the api).

    Attributes:
        model: folder, hub id or GGUF file; empty is the embedded default.
        model_source: the hub an id belongs to.
        model_revision: branch, tag or commit of the hub's repository.
        dead_letter_bodies: keep requests that are given up with their dead letters, so that `launcher dead replay`
            can send them again. They hold prompts, so they are not kept unless asked for.
    """

    model: str = ""
    model_source: Literal["huggingface", "modelscope"] = "huggingface"
    model_revision: str = ""
    dead_letter_bodies: bool = False


S = TypeVar("S", bound=RedisSettings)


def load(cls: type[S], overrides: Mapping[str, Any] | None = None) -> S:
    """Read a settings class from the environment.

    Args:
        cls: the class to fill.
        overrides: field -> value, stronger than the environment (flags of a command line).

    Raises:
        ConfigError: one or more values are bad; each is named by its variable, with the reason, and the value
            unless that may be a secret.
    """
    try:
        return cls(**(overrides or {}))
    except ValidationError as e:
        raise ConfigError("; ".join(_reason(error) for error in e.errors())) from e
    except SettingsError as e:
        raise ConfigError(f"{e}: {e.__cause__}" if e.__cause__ else str(e)) from e


def _reason(error: Any) -> str:
    """Say which variable is bad, and why. Keys, passwords, and addresses that may hold one are not shown."""
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name, value = str(error["loc"][0]).upper().removeprefix(ENV_PREFIX), error["input"]
    is_told = re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", message)
    shows = isinstance(value, str | int | float) and not is_told and not _SECRET.search(name)
    shown = f"{str(value)[:_SHOWN_CHARS]!r}: " if shows else ""
    return f"{ENV_PREFIX}{name}: {shown}{message}"
