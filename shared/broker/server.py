"""What kind of server the broker is, whether it will do, and what the services of an installation agree on."""

from typing import Any, Final, NamedTuple

from shared.broker.call import Call, call_script, load_script
from shared.errors import ConfigError
from shared.keys import NUM_SHARDS, Keys
from shared.messages import WIRE_VERSION

OLDEST: Final = (6, 2)

_AGREE: Final = load_script("agree")


class ServerInfo(NamedTuple):
    """What a server says of itself.

    Attributes:
        version: (major, minor) of the Redis it is or is compatible with.
        policy: what it does when memory is full; anything but noeviction may lose requests.
        max_bytes: 0 without a limit.
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


def info() -> Call[ServerInfo]:
    """Ask a server about itself; also for the memory it uses."""
    return Call(("INFO",), _parse_info)


def agree(keys: Keys, *, num_shards: int = NUM_SHARDS, wire_version: int = WIRE_VERSION) -> Call[Agreement]:
    """Write what the installation has not agreed on yet, and learn what it has."""
    return call_script(_AGREE, [keys.meta], [wire_version, num_shards], lambda a: Agreement(int(a[0]), int(a[1])))


def check(server: ServerInfo) -> list[str]:
    """Judge a server.

    Returns:
        Warnings to log.

    Raises:
        ConfigError: it is too old, or a cluster.
    """
    if server.clustered:
        raise ConfigError(
            "redis_url names a Redis Cluster, which cannot serve: the scripts touch keys of several slots at once; "
            "use a single server, or sentinels (redis+sentinel://)"
        )
    if server.version < OLDEST:
        raise ConfigError(f"the Redis server is {server.version[0]}.{server.version[1]}, 6.2 or newer is needed")
    if server.policy != "noeviction":
        return [
            f"the Redis server's maxmemory-policy is {server.policy}: it may delete queued requests when its memory "
            "is full; set it to noeviction"
        ]
    return []


def check_agreement(keys: Keys, agreement: Agreement) -> None:
    """Make sure that this service speaks the wire version of the others.

    Raises:
        ConfigError: it does not.
    """
    if agreement.wire_version != WIRE_VERSION:
        raise ConfigError(
            f"the installation under redis_prefix {keys.prefix!r} speaks wire version {agreement.wire_version}, this "
            f"service {WIRE_VERSION}: run services of one release, or use another prefix"
        )


def _parse_info(answer: Any) -> ServerInfo:
    lines = (line.partition(":") for line in bytes(answer).decode("utf-8", "replace").splitlines())
    fields = {name: value for name, _, value in lines}
    major, minor, *_ = (fields.get("redis_version", "0.0") + ".0").split(".")
    return ServerInfo(
        (int(major), int(minor)),
        fields.get("redis_mode") == "cluster" or fields.get("cluster_enabled") == "1",
        fields.get("maxmemory_policy", "noeviction"),
        int(fields.get("used_memory", 0)),
        int(fields.get("maxmemory", 0)),
    )
