"""Who an engine is towards the broker and towards other engines."""

from dataclasses import dataclass

from shared.keys import LEASE_S


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Who this engine is.

    Attributes:
        me: incarnation.
        model: served model name.
        fingerprint: of the engine; only engines of the same take requests over from each other.
        num_shards: token streams, as the installation agreed.
        lease_s: of engines.
        api_lease_s: of api replicas.
        dead_letter_bodies: dead letters hold the request, so that it can be sent again.
    """

    me: str
    model: str
    fingerprint: str
    num_shards: int
    lease_s: float = LEASE_S["scheduler"]
    api_lease_s: float = LEASE_S["api"]
    dead_letter_bodies: bool = False
