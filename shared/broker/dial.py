"""How a connection is made: plain, encrypted, over a Unix socket, or to the master that sentinels know.

Owns the options of the client library. Its own retries are off, because it would send again what may have been
done; its answers are left as the server sends them (RESP 2, bytes).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio.connection
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.connection
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.broker.url import Target, parse_url
from shared.settings import RedisSettings

# The library's annotations leave these constructors untyped.
_sync: Any = redis.connection
_sync_sentinel: Any = redis.sentinel
_async: Any = redis.asyncio.connection
_async_sentinel: Any = redis.asyncio.sentinel
_async_retry: Any = redis.asyncio.retry

SOCKET_TIMEOUT_S: Final = 5.0
"""How long an answer may take; longer than any blocking read waits (`MAX_BLOCK_MS`)."""
SENTINEL_TIMEOUT_S: Final = 1.0
"""How long one sentinel may take before the next one is asked."""


@dataclass(frozen=True, slots=True)
class Dialer:
    """Makes connections to one target.

    Attributes:
        target: where they lead; its text form holds no secret.
        dial: makes a connection object, not connected yet.
        sentinels: clients to be closed with the last connection.
    """

    target: Target
    dial: Callable[[], Any]
    sentinels: tuple[Any, ...] = ()


def dialer(settings: RedisSettings, name: str, timeout_s: float = SOCKET_TIMEOUT_S) -> Dialer:
    """Prepare connections for threads, whose answers may take so long.

    Raises:
        ConfigError: the URL cannot be understood, or the password file not read.
    """
    target = parse_url(settings.redis_url)
    options = _options(settings, target, name, timeout_s) | {"retry": Retry(NoBackoff(), 0)}
    if target.service:
        sentinel = _sync_sentinel.Sentinel(
            target.hosts, sentinel_kwargs=_sentinel_options(settings, target) | {"retry": Retry(NoBackoff(), 0)}
        )
        pool = _sync_sentinel.SentinelConnectionPool(target.service, sentinel, **options, ssl=target.tls)
        return Dialer(target, pool.make_connection, tuple(sentinel.sentinels))
    if target.path:
        return Dialer(target, lambda: _sync.UnixDomainSocketConnection(path=target.path, **options))
    kind = _sync.SSLConnection if target.tls else _sync.Connection
    host, port = target.hosts[0]
    return Dialer(target, lambda: kind(host=host, port=port, **options))


def async_dialer(settings: RedisSettings, name: str) -> Dialer:
    """Prepare connections for an event loop. Raises as `dialer`."""
    target = parse_url(settings.redis_url)
    # Its own timeout loses cancellations (`asyncio.wait_for` before Python 3.12): AsyncBroker keeps the time itself.
    options = _options(settings, target, name) | {"retry": _async_retry.Retry(NoBackoff(), 0), "socket_timeout": None}
    if target.service:
        sentinel = _async_sentinel.Sentinel(
            list(target.hosts),
            sentinel_kwargs=_sentinel_options(settings, target) | {"retry": _async_retry.Retry(NoBackoff(), 0)},
        )
        pool = _async_sentinel.SentinelConnectionPool(target.service, sentinel, **options, ssl=target.tls)
        return Dialer(target, pool.make_connection, tuple(sentinel.sentinels))
    if target.path:
        return Dialer(target, lambda: _async.UnixDomainSocketConnection(path=target.path, **options))
    kind = _async.SSLConnection if target.tls else _async.Connection
    host, port = target.hosts[0]
    return Dialer(target, lambda: kind(host=host, port=port, **options))


def _options(settings: RedisSettings, target: Target, name: str, timeout_s: float = SOCKET_TIMEOUT_S) -> dict[str, Any]:
    password = settings.read_redis_password()
    return {
        "username": settings.redis_username or target.username,
        "password": target.password if password is None else password,
        "db": target.db,
        "client_name": name,
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        **_tls(settings, target),
        **({} if target.path else {"socket_keepalive": True}),
    }


def _sentinel_options(settings: RedisSettings, target: Target) -> dict[str, Any]:
    password = settings.redis_sentinel_password
    return {
        "username": settings.redis_sentinel_username,
        "password": None if password is None else password.get_secret_value(),
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "ssl": target.tls,
        **_tls(settings, target),
    }


def _tls(settings: RedisSettings, target: Target) -> dict[str, Any]:
    if not target.tls or settings.redis_ca_file is None:
        return {}
    return {"ssl_ca_certs": str(settings.redis_ca_file)}
