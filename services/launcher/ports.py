"""Ports of a launch: the one that was asked for must be free, the others are the next free ones."""

import errno
import socket
from typing import Final

from shared.errors import ConfigError

FIRST_HEALTH_PORT: Final = {"tokenizer": 9101, "scheduler": 9102, "detokenizer": 9103}
HEALTH_PORT_STEP: Final = 10
_TRIES: Final = 500


class Ports:
    """Hands out ports that nobody listens on and that it has not handed out before."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def exactly(self, host: str, port: int) -> int:
        """Take a port; 0 takes any.

        Raises:
            ConfigError: somebody listens there, or the address is not ours.
        """
        try:
            found = _bind(host, port)
        except OSError as e:
            raise ConfigError(f"MILLRACE_PORT: cannot listen on {host}:{port}: {e.strerror}") from e
        if found in self._taken:
            raise ConfigError(f"MILLRACE_PORT: {port} is given to two services")
        self._taken.add(found)
        return found

    def next_free(self, host: str, port: int, step: int = HEALTH_PORT_STEP) -> int:
        """Take the first free one of port, port + step, ...

        Raises:
            ConfigError: none is free, or the address is not ours.
        """
        for candidate in range(port, min(port + step * _TRIES, 65536), step):
            if candidate in self._taken:
                continue
            try:
                _bind(host, candidate)
            except OSError as e:
                if e.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise ConfigError(f"MILLRACE_HEALTH_HOST: cannot listen on {host}: {e.strerror}") from e
            self._taken.add(candidate)
            return candidate
        raise ConfigError(f"MILLRACE_HEALTH_PORT: no free port at or above {port}")


def _bind(host: str, port: int) -> int:
    """Listen for a moment; give the port. Raises OSError when that cannot be done."""
    family, kind, proto, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)
        return int(probe.getsockname()[1])


def reachable(host: str) -> str:
    """Give the address at which a listener on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)
