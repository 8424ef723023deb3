"""Which token streams fall to which detokenizer, by rendezvous hashing over the living.

Everyone computes it alone from the heartbeats. For a moment two may disagree and read the same stream, which
compare-and-append makes harmless; that nobody reads a stream lasts no longer than a lease.
"""

from collections.abc import Mapping
from hashlib import blake2b

from shared.messages import Heartbeat


def owned_shards(me: str, name: str, model: str, living: Mapping[str, Heartbeat], num_shards: int) -> list[int]:
    """Give the shards of a model that fall to an instance.

    Args:
        me: incarnation of the instance; it counts as living whatever the heartbeats say.
        name: its name. Another incarnation of the same name is its predecessor, whose lease need not be awaited.
        model: whose streams are shared out.
        living: incarnation -> heartbeat of the living detokenizers.
        num_shards: streams per model.
    """
    rivals = [me]
    for incarnation, beat in living.items():
        if incarnation != me and beat.model == model and beat.name != name and not beat.draining:
            rivals.append(incarnation)
    return [shard for shard in range(num_shards) if max(rivals, key=lambda i: _weight(shard, i)) == me]


def _weight(shard: int, incarnation: str) -> bytes:
    return blake2b(f"{shard}:{incarnation}".encode(), digest_size=8).digest()
