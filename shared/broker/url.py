"""Where the broker is: the forms of `redis_url`, and the same without its secrets for logs."""

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs, unquote

from shared.errors import ConfigError

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379

_SENTINEL_SCHEMES: Final = {
    "redis+sentinel": False,
    "rediss+sentinel": True,
    "sentinel": False,
    "sentinels": True,
}
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+)(?::(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL.

    Attributes:
        hosts: (host, port) of the server, or of the sentinels.
        service: name of the master that the sentinels know; empty without sentinels.
        path: of a Unix socket; empty otherwise.
        tls: whether connections (to sentinels too) are encrypted.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    path: str = ""
    db: int = 0
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Give the URL without the password, for logs."""
        user = (
            f"{self.username or ''}:***@" if self.password is not None else f"{self.username}@" if self.username else ""
        )
        if self.path:
            return f"unix://{user}{self.path}?db={self.db}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        scheme = ("rediss" if self.tls else "redis") + ("+sentinel" if self.service else "")
        return f"{scheme}://{user}{hosts}/{f'{self.service}/' if self.service else ''}{self.db}"


def parse_url(url: str) -> Target:
    """Understand a broker's URL.

    Forms: redis://[user:password@]host[:port][/db], rediss:// for TLS, unix://[user:password@]/path[?db=n],
    redis+sentinel://[user:password@]host[:port][,host[:port]..]/service[/db] and rediss+sentinel://
    (sentinel:// and sentinels:// are short for them). Everything before the last `@` is user and password,
    percent-encoded.

    Raises:
        ConfigError: it is none of these. The message holds no part of the URL that may be secret.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigError("redis_url: no scheme, expected redis://, rediss://, unix:// or redis+sentinel://")
    userinfo, at, place = rest.rpartition("@")
    username, colon, password = userinfo.partition(":")
    user = unquote(username) or None if at else None
    secret = unquote(password) if colon else None
    if scheme == "unix":
        path, _, query = place.partition("?")
        if not path.startswith("/"):
            raise ConfigError("redis_url: unix:// needs an absolute path")
        return Target(path=path, db=_db(parse_qs(query).get("db", ["0"])[0]), username=user, password=secret)
    if scheme not in ("redis", "rediss") and scheme not in _SENTINEL_SCHEMES:
        raise ConfigError("redis_url: unknown scheme, expected redis://, rediss://, unix:// or redis+sentinel://")
    address, _, query = place.partition("?")
    network, _, path = address.partition("/")
    parts = [unquote(part) for part in path.split("/") if part]
    db = parse_qs(query).get("db", ["0"])[0]
    if scheme in _SENTINEL_SCHEMES:
        if not 1 <= len(parts) <= 2:
            raise ConfigError("redis_url: sentinels need the master's name: redis+sentinel://host:port/service[/db]")
        hosts = tuple(_host(text, SENTINEL_PORT) for text in network.split(","))
        db = parts[1] if len(parts) == 2 else db
        return Target(hosts, parts[0], "", _db(db), _SENTINEL_SCHEMES[scheme], user, secret)
    if len(parts) > 1:
        raise ConfigError("redis_url: more than a database number after the host")
    host = _host(network or "127.0.0.1", REDIS_PORT)
    return Target((host,), "", "", _db(parts[0] if parts else db), scheme == "rediss", user, secret)


def _host(text: str, default_port: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text.strip())
    if found is None:
        raise ConfigError("redis_url: a host is not of the form host[:port] (percent-encode the password)")
    port = int(found[2] or default_port)
    if not 0 < port < 65536:
        raise ConfigError(f"redis_url: {port} is not a port")
    return found[1].strip("[]"), port


def _db(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError("redis_url: the database is not a number")
    return int(text)
