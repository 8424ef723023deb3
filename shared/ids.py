"""Identifiers: the uid of one choice and the incarnation of one service instance.

A uid is 128 bits: 48 of milliseconds since the epoch, so that keys sort by time, and 80 of chance, so that
any number of api replicas make them without asking each other. It is made by us alone and never taken from
a client, which is why it may stand in a Redis key.
"""

import os
import secrets
import time
import zlib
from typing import Final

BIRTH: Final = "MILLRACE_BIRTH"
"""Variable with the mark of one start of an instance; not a setting, as only the launcher gives it."""


def new_uid() -> str:
    """Make the id of one choice: 32 lower-case hex digits, sortable by the time it was made."""
    return f"{time.time_ns() // 1_000_000 & 0xFFFFFFFFFFFF:012x}{secrets.token_hex(10)}"


def new_incarnation(name: str) -> str:
    """Make the id of one run of a service instance: a restart under the same name is somebody else."""
    return f"{name}-{secrets.token_hex(4)}"


def birth_mark() -> str:
    """Give the mark under which this process, or one above it, was started; empty where nobody marks."""
    return os.environ.get(BIRTH, "")


def shard_of(uid: str, num_shards: int) -> int:
    """Say which tokens stream carries a uid; every service must agree, so it depends on nothing else."""
    return zlib.crc32(uid.encode()) % num_shards
