"""What kind of server the broker is, whether it will do, and what the services of an installation agree on."""

from typing import NamedTuple

from shared.broker.call import Call
from shared.keys import NUM_SHARDS, Keys
from shared.messages import WIRE_VERSION


class ServerInfo(NamedTuple):
    """What a server says of itself.

    Attributes:
        version: (major, minor) of the Redis it is or is compatible with.
        policy: what it does when memory is full; anything but noeviction may lose requests.
    """

    version: tuple[int, int]
    clustered: bool
    policy: str
    used_bytes: int
    max_bytes: int

    @property
    def used_ratio(self) -> float:
        """Share of the memory limit in use, 0 without a limit."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0


class Agreement(NamedTuple):
    """What is in `meta`: all services of an installation read it there."""

    wire_version: int
    num_shards: int


def info(keys: Keys) -> Call[ServerInfo]:
    """Ask a server about itself; also for the memory it uses."""


def agree(keys: Keys, *, num_shards: int = NUM_SHARDS, wire_version: int = WIRE_VERSION) -> Call[Agreement]:
    """Write what the installation has not agreed on yet, and learn what it has."""


def check(server: ServerInfo, agreement: Agreement, url: str) -> list[str]:
    """Judge a server at start.

    Returns:
        Warnings to log.

    Raises:
        ConfigError: too old, a cluster, or an installation of another wire version or shard count.
    """
