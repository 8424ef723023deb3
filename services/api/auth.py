"""API keys: who may call, and under which tenant's name.

Keys are kept as SHA-256 digests and compared in constant time. Knows the header, not the routes.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from services.api.settings import ApiSettings
from shared.errors import ConfigError, NotAuthorized


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who a request belongs to: `name` may be logged, `key_hash` ties a reply log to its key."""

    name: str
    key_hash: str


ANYBODY = Tenant("", "")
"""The tenant of an api without keys."""


class KeyRing:
    """The keys of this api. Empty: everybody may call."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._tenants: list[tuple[bytes, Tenant]] = []
        for number, entry in enumerate(entries, 1):
            name, found, key = entry.partition("=")
            if not found:
                name, key = f"key{number}", entry
            if not key.strip("="):  # also the padding of a key in base64, which nobody meant to be the key
                raise ConfigError(
                    f"MILLRACE_API_KEYS: entry {number} has no key behind its name; one that ends in = needs a name"
                )
            digest = hashlib.sha256(key.encode()).digest()
            self._tenants.append((digest, Tenant(name, digest.hex()[:16])))

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


def read_keys(settings: ApiSettings) -> KeyRing:
    """Collect the keys of the settings and of the key file.

    Raises:
        ConfigError: the file cannot be read, or an entry has no key.
    """
    entries = [key.get_secret_value() for key in settings.api_keys]
    if settings.api_keys_file is not None:
        try:
            lines = settings.api_keys_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"MILLRACE_API_KEYS_FILE: cannot be read: {e}") from e
        entries += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return KeyRing(entries)


def same_key(expected: str, authorization: bytes | None) -> bool:
    """Compare one bearer token (of the metrics page) in constant time."""
    given = (authorization or b"").strip().partition(b" ")[2].strip()
    return hmac.compare_digest(hashlib.sha256(expected.encode()).digest(), hashlib.sha256(given).digest())
