"""Ports of a launch: the one that was asked for must be free, the others are the next free ones."""

import errno
import socket
from typing import Final

from shared.errors import ConfigError

FIRST_HEALTH_PORT: Final = {"tokenizer": 9101, "scheduler": 9102, "detokenizer": 9103}
HEALTH_PORT_STEP: Final = 10
_TRIES: Final = 500


class Ports:
    """Hands out ports that nobody listens on and that no launcher has handed out before.

    A port stays claimed as long as this object lives: while one of our instances is being started again nobody
    listens there, and another launcher must not take it for free.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._claims: list[socket.socket] = []

    def __del__(self) -> None:
        for claim in self._claims:
            claim.close()

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
        if not self._claim(found):
            if port:
                raise ConfigError(f"MILLRACE_PORT: {port} is another launcher's")
            return self.exactly(host, port)
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
            if self._claim(candidate):
                return candidate
        raise ConfigError(f"MILLRACE_HEALTH_PORT: no free port at or above {port}")

    def _claim(self, port: int) -> bool:
        """Claim a port among all launchers of this network: an abstract socket's name is gone with its process."""
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0millrace-port-{port}")
        except OSError:
            claim.close()
            return False
        self._claims.append(claim)
        self._taken.add(port)
        return True


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
