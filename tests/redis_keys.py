"""Raw Redis commands and the keys of one prefix, for tests."""

from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.settings import RedisSettings


def command(*words: str | bytes | int) -> Call[object]:
    """Make a call of any Redis command, its answer as the server gives it."""
    return Call(words, lambda answer: answer)


def find_keys(broker: Broker) -> list[bytes]:
    """List the keys of the broker's prefix."""
    found: set[bytes] = set()
    cursor: bytes = b"0"
    while True:
        cursor, some = broker.run(Call(("SCAN", cursor, "MATCH", f"{broker.keys.prefix}:*", "COUNT", 1000), tuple))
        found.update(some)
        if cursor == b"0":
            return sorted(found)


def delete_keys(settings: RedisSettings) -> None:
    """Delete the keys of a prefix."""
    with Broker(settings) as broker:
        found = find_keys(broker)
        if found:
            broker.run(command("DEL", *found))
