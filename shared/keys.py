"""Every Redis key, with its bounds and its time to live. No other module spells a key.

The life of each key is told in docs/messages.md; the rules that keep them consistent are in docs/protocol.md.
"""

from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["api", "tokenizer", "scheduler", "detokenizer"]

TOKENIZER_GROUP: Final = "tokenizers"
NUM_SHARDS: Final = 4
"""Token streams per model. Fixed once per installation: the first service writes it into `meta`."""

REPLY_TTL_MS: Final = 600_000
"""Life of a reply log that nobody holds; the engine that holds the request refreshes it."""
REPLY_HELD_TTL_MS: Final = 700_000
"""What an engine's audit sets: a remaining life above REPLY_TTL_MS says that somebody holds the request."""
ENDED_TTL_MS: Final = 60_000
"""Life of a reply log after its terminal; a resumable one keeps a lifetime of its own (its header says it)."""
ABORT_TTL_MS: Final = 3_000
"""Life of a doorbell. Whoever misses it learns the same from the log, with its next audit."""
INBOX_TTL_MS: Final = 60_000
FLUSH_TTL_MS: Final = 3_000
"""Life of the number of a flush. After a longer silence logs are asked where they end, once."""
GENERATE_TTL_MS: Final = 3_600_000
SLOT_TTL_MS: Final = 15_000
"""Life of a limited key's place for a request whose replica says nothing: that of the replica's own lease."""

INBOX_CAP: Final = 1_000
DEAD_CAP: Final = 1_000
ASIDE_TTL_MS: Final = 3_600_000
"""How long what a stranger has put in the place of one of our keys is kept, under a name of its own."""
TOKENS_PAUSE_LEN: Final = 2_000
"""The step loop pauses while a tokens stream is longer than this: nothing unread is ever trimmed."""
APPEND_CAP: Final = 128
"""Uids per `append` call: bounds how long one script holds the Redis server."""

LEASE_S: Final[dict[Role, float]] = {"api": 15.0, "scheduler": 5.0, "detokenizer": 1.5, "tokenizer": 1.5}
SUCCEEDED_S: Final = 1.5
"""Lease of an instance whose successor lives: another one that beats under its name and on its port."""
BEAT_S: Final = 0.5

_KINDS: Final = {
    "tokenize": "stream", "generate": "stream", "tokens": "stream", "inbox": "stream", "reply": "stream",
    "dead": "stream", "alive": "hash", "meta": "hash", "bucket": "hash", "stream": "hash", "slots": "zset",
    "streams": "zset", "abort": "string", "flush": "string",
}  # fmt: skip
"""What the server calls the kind of each of our keys, by the word after the prefix."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of all keys of one installation. Two installations on one Redis differ in `prefix`."""

    prefix: str

    def tokenize(self, model: str) -> str:
        """Stream, group `tokenizers`: one entry per HTTP request that no engine has yet."""
        return f"{self.prefix}:tokenize:{model}"

    def generate(self, engine: str) -> str:
        """Stream without a group: one entry per unfinished uid of that engine."""
        return f"{self.prefix}:generate:{engine}"

    def tokens(self, model: str, shard: int) -> str:
        """Stream without a group: one entry per engine step; the shard's detokenizer deletes what it has said."""
        return f"{self.prefix}:tokens:{model}:{shard}"

    def inbox(self, replica: str) -> str:
        """Stream with one reader: the deltas of all uids of one api replica, one entry per detokenizer flush."""
        return f"{self.prefix}:inbox:{replica}"

    def reply(self, uid: str) -> str:
        """The log of one uid, the truth about it: ids are `<attempt>-<tokens said so far>`."""
        return f"{self.prefix}:reply:{uid}"

    def abort(self, uid: str) -> str:
        """The doorbell of a terminal: set by the scripts that end a log, looked at by engines on every step."""
        return f"{self.prefix}:abort:{uid}"

    def flush(self, writer: str) -> str:
        """The number of a detokenizer's last flush: where it is, everything is that was there before."""
        return f"{self.prefix}:flush:{writer}"

    def bucket(self, tenant: str) -> str:
        """Hash of what an API key may still start and use within its minute; gone when it is full again."""
        return f"{self.prefix}:bucket:{tenant}"

    def slots(self, tenant: str) -> str:
        """Sorted set of an API key's requests under way, each with the time at which nobody holds it any more."""
        return f"{self.prefix}:slots:{tenant}"

    def stream(self, uid: str) -> str:
        """Hash: a response that its client may come back to, named by its first uid; what an api needs to tell it."""
        return f"{self.prefix}:stream:{uid}"

    @property
    def streams(self) -> str:
        """Sorted set of the unfinished ones of those, by the time at which they lapse."""
        return f"{self.prefix}:streams"

    def alive(self, role: Role) -> str:
        """Hash of heartbeats, incarnation -> Heartbeat."""
        return f"{self.prefix}:alive:{role}"

    @property
    def meta(self) -> str:
        """Hash: what all services of the installation must agree on (shards, wire version)."""
        return f"{self.prefix}:meta"

    @property
    def dead(self) -> str:
        """Capped stream of requests and messages that were given up."""
        return f"{self.prefix}:dead"

    def kind_of(self, name: str) -> str | None:
        """Say what kind of key a name of ours stands for, as the server calls it; None if it is no name of ours."""
        prefix, word = f"{self.prefix}:", name.removeprefix(f"{self.prefix}:").partition(":")[0]
        return _KINDS.get(word) if name.startswith(prefix) else None

    def aside(self, name: str) -> str:
        """Name what was found under a name of ours and is none of ours."""
        return f"{self.prefix}:strange:{name.removeprefix(f'{self.prefix}:')}"
