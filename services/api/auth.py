"""API keys: who may call, under which tenant's name, and within which limits.

Keys are kept as SHA-256 digests and compared in constant time. A file of keys is looked at again and again, and
what is in it counts at once; one that cannot be used changes nothing. Knows the header, not the routes.

An entry, in the setting or on a line of the file, is `key` or `name=key`, with limits behind it where they differ
from the settings': `team=sk-1 concurrency=8 requests=600 tokens=100000`. Several keys may have one name: they are
one tenant and share its limits.
"""

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from services.api.settings import ApiSettings
from shared.broker.limits import Limits
from shared.errors import ConfigError, NotAuthorized

log = logging.getLogger(__name__)

RELOAD_S: Final = 1.0
"""How often the file of keys is looked at."""
_NAME: Final = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
_LIMIT: Final = re.compile(r"(concurrency|requests|tokens)=([0-9]{1,12})")

_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a request belongs to: `name` may be logged, `key_hash` ties a reply log to its key."""

    name: str
    key_hash: str
    limits: Limits = field(default_factory=Limits)


ANYBODY = Tenant("", "")
"""The tenant of an api without keys."""


class KeyRing:
    """The keys of this api. Empty: everybody may call.

    Args:
        entries: as the module's docstring says.
        defaults: limits of the keys that name none.
        places: where each entry stands, for a refusal; without them they are numbered, as in the setting.

    Raises:
        ConfigError: an entry is malformed; says which, and not what it holds.
    """

    def __init__(
        self,
        entries: Iterable[str],
        defaults: Limits = Limits(),  # noqa: B008  # frozen
        places: Sequence[str] = (),
    ) -> None:
        self._tenants: list[tuple[bytes, Tenant]] = []
        for number, entry in enumerate(entries, 1):
            where = places[number - 1] if places else _in_setting(number)
            name, key, limits = _read_entry(number, where, entry, defaults)
            digest = hashlib.sha256(key.encode()).digest()
            self._tenants.append((digest, Tenant(name, digest.hex()[:16], limits)))

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: bytes | None) -> Tenant:
        """Find whose key an Authorization header carries.

        Raises:
            NotAuthorized: no key, another scheme, or a key that is not ours.
        """
        if not self._tenants:
            return ANYBODY
        if authorization is None:
            raise NotAuthorized("an API key is needed: send it as `Authorization: Bearer <key>`")
        scheme, _, key = authorization.strip().partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found: Tenant | None = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if scheme.lower() != b"bearer" or found is None:
            raise NotAuthorized("the API key is not valid")
        return found


class KeyStore:
    """The keys of the settings and of their file, as the file is now. Used by one event loop.

    Raises:
        ConfigError: at the start the file cannot be used, or an entry is malformed.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._path = settings.api_keys_file
        self._stamp: _Stamp | None = None
        self._ring = KeyRing([])
        self._load()

    def __bool__(self) -> bool:
        return bool(self._ring)

    def tenant(self, authorization: bytes | None) -> Tenant:
        """Find whose key an Authorization header carries. Raises as `KeyRing.tenant`."""
        return self._ring.tenant(authorization)

    def reload(self) -> bool | None:
        """Take in the file if it has changed. True: it was; False: it cannot be used; None: nothing changed.

        A file that changed while it was read is read again the next time.
        """
        if self._path is None or _stamp_of(self._path) == self._stamp:
            return None
        try:
            self._load()
        except ConfigError as e:
            log.error("the API keys stay as they are: %s", e)
            return False
        log.info("the API keys were read again")
        return True

    async def watch(self, tell: Callable[[bool], None]) -> None:
        """Reload for ever, and tell how each change went. Files are read aside: they may lie on a network."""
        while True:
            await asyncio.sleep(RELOAD_S)
            outcome = await asyncio.to_thread(self.reload)
            if outcome is not None:
                tell(outcome)

    def _load(self) -> None:
        settings = self._settings
        entries = [key.get_secret_value() for key in settings.api_keys]
        defaults = Limits(settings.key_concurrency, settings.key_requests_per_minute, settings.key_tokens_per_minute)
        places = [_in_setting(number) for number in range(1, len(entries) + 1)]
        stamp = None
        if self._path is not None:
            stamp = self._stamp = _stamp_of(self._path)
            for number, entry in _read_file(self._path):
                entries.append(entry)
                places.append(f"MILLRACE_API_KEYS_FILE: {self._path}, line {number}")
        self._ring = KeyRing(entries, defaults, places)
        if self._path is not None and _stamp_of(self._path) != stamp:
            self._stamp = None


def _in_setting(number: int) -> str:
    return f"MILLRACE_API_KEYS: entry {number}"


def _read_entry(number: int, where: str, entry: str, defaults: Limits) -> tuple[str, str, Limits]:
    """Take an entry apart: name, key, limits."""
    first, *rest = entry.split()
    name, found, key = first.partition("=")
    if not found:
        name, key = f"key{number}", first
    if not key.strip("="):  # also the padding of a key in base64, which nobody meant to be the key
        raise ConfigError(f"{where}: no key behind its name; one that ends in = needs a name")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has up to 64 of A-Z a-z 0-9 . _ : @ -")
    limits = defaults
    for word in rest:
        match = _LIMIT.fullmatch(word)
        if match is None:
            raise ConfigError(f"{where}: behind a key only concurrency=N, requests=N and tokens=N may stand")
        limits = replace(limits, **{match[1]: int(match[2])})
    return name, key, limits


def _read_file(path: Path) -> list[tuple[int, str]]:
    """Read the entries of a file, each with its line; blank lines and comments, which begin with #, are left out."""
    try:
        lines = [line.partition(" #")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"MILLRACE_API_KEYS_FILE: cannot be read: {e}") from e
    entries = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not entries:  # it would open the api to everybody
        raise ConfigError(f"MILLRACE_API_KEYS_FILE: {path}: holds no key")
    return entries


def _stamp_of(path: Path) -> _Stamp | None:
    """Tell one state of a file from another, through symbolic links: a mounted secret is changed by a new link."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def same_key(expected: str, authorization: bytes | None) -> bool:
    """Compare one bearer token (of the metrics page) in constant time."""
    given = (authorization or b"").strip().partition(b" ")[2].strip()
    return hmac.compare_digest(hashlib.sha256(expected.encode()).digest(), hashlib.sha256(given).digest())
