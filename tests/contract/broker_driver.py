"""Drives requests through the broker in tests, one call at a time, and shows what is in Redis."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from shared.broker import control, replies, streams
from shared.broker.append import Item, Terminal, append
from shared.broker.call import Call
from shared.broker.connection import Broker
from shared.broker.log_id import NO_LOG, LogId, make_end_id, make_log_id, split_log_id
from shared.broker.streams import Choice, GenerateEntry, Opened, Why
from shared.ids import new_uid
from shared.messages import (
    Delta,
    FenceHeader,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    Prompt,
    ReplyHeader,
    Said,
    TokenizeRequest,
    encode,
)
from shared.sampling import SamplingParams
from tests.redis_keys import command, find_keys

T = TypeVar("T")
MODEL = "tiny"
REPLICA = "api-1"
_nonces = itertools.count()


class Driver:
    """One installation with engines `A` and `B`, and everything a test wants to do to it in one line."""

    def __init__(self, broker: Broker, engines: Sequence[str] = ("A", "B")) -> None:
        self.broker = broker
        self.keys = broker.keys
        for engine in engines:
            self.beat(engine)

    def run(self, call: Call[T]) -> T:
        return self.broker.run(call)

    def redis(self, *words: str | bytes | int) -> Any:
        return self.broker.run(command(*words))

    def beat(self, engine: str, count: int = 1) -> control.Look:
        return self.run(control.beat_and_look(self.keys, "scheduler", engine, Heartbeat(beat=count, name=engine)))

    # --- api ---

    def open_call(
        self,
        *uids: str,
        expect: LogId = NO_LOG,
        seen: int = 0,
        said: Said | None = None,
        cap: int | None = 100,
        resumable_ms: int = 0,
    ) -> Call[Opened]:
        header = ReplyHeader(replica=REPLICA, resumable_ms=resumable_ms)
        request = TokenizeRequest(
            uids=list(uids),
            prompts=[Prompt(text="hello")],
            n=len(uids),
            seeds=[1] * len(uids),
            params=SamplingParams(max_tokens=8),
            model=MODEL,
        )
        choices = [Choice(uid, header, expect, seen, said) for uid in uids]
        return streams.open_request(self.keys, request, choices, cap=cap)

    def open(self, *uids: str, **options: Any) -> Opened:
        return self.run(self.open_call(*uids, **options))

    def opened(self, **options: Any) -> str:
        uid = new_uid()
        assert self.open(uid, **options).outcome == "OK"
        return uid

    # --- tokenizer ---

    def read_one(self, consumer: str = "t1") -> streams.QueueEntry:
        (entry,) = self.run(streams.read_queue(self.keys, MODEL, consumer, count=1))
        return entry

    def move_call(self, entry: streams.QueueEntry, engine: str = "A") -> Call[streams.Moved]:
        requests = [GenerateRequest(uid, [1, 2, 3], SamplingParams(max_tokens=8)) for uid in entry.uids]
        return streams.move(self.keys, MODEL, entry.entry_id, engine, requests)

    def queued(self, engine: str = "A", **options: Any) -> GenerateEntry:
        """Open a new uid and bring it into an engine's stream."""
        uid = self.opened(**options)
        assert self.run(self.move_call(self.read_one(), engine)) == "OK"
        return next(entry for entry in self.entries(engine) if entry.uid == uid)

    # --- engine ---

    def entries(self, engine: str = "A") -> list[GenerateEntry]:
        return self.run(streams.read_generate(self.keys, engine))

    def fence_call(
        self,
        entry: GenerateEntry,
        engine: str = "A",
        *,
        why: Why | None = None,
        solo: bool = True,
        nonce: str | None = None,
    ) -> Call[replies.Fenced]:
        return replies.fence(
            self.keys,
            entry.uid,
            engine,
            entry.entry_id,
            nonce or f"nonce-{next(_nonces)}",
            why or entry.why,
            FenceHeader(engine, entry.entry_id.decode(), 3, [1, 2, 3]),
            solo=solo,
        )

    def fence(self, entry: GenerateEntry, engine: str = "A", **options: Any) -> replies.Fenced:
        return self.run(self.fence_call(entry, engine, **options))

    def take_call(self, entry: GenerateEntry, source: str = "A", target: str = "B", why: Why = "crash") -> Call[Any]:
        return streams.take(self.keys, source, entry.entry_id, entry.uid, target, why)

    def take(self, entry: GenerateEntry, source: str = "A", target: str = "B", why: Why = "crash") -> str:
        return str(self.run(self.take_call(entry, source, target, why)))

    # --- detokenizer ---

    def item(
        self,
        entry: GenerateEntry,
        prev: LogId,
        attempt: int,
        token_ids: Sequence[int],
        *,
        finish: FinishReason | None = None,
        engine: str = "A",
        ttl_ms: int = 60_000,
    ) -> Item:
        """Say tokens behind `prev`; with `finish` they are the last."""
        said = split_log_id(prev)[1]
        after = said + len(token_ids)
        delta = Delta(said + 1, list(token_ids), "".join(f"<{t}>" for t in token_ids), finish=finish)
        log_id = make_log_id(attempt, after) if finish is None else make_end_id(after)
        terminal = None if finish is None else Terminal(engine, entry.entry_id, ttl_ms)
        return Item(entry.uid, prev, log_id, encode(delta), REPLICA, terminal)

    def append(self, *items: Item) -> list[LogId]:
        return self.run(append(self.keys, items))

    def say(self, entry: GenerateEntry, token_ids: Sequence[int], **options: Any) -> LogId:
        """Append to the log as it is now, with its own attempt."""
        prev = self.last(entry.uid)
        (answer,) = self.append(self.item(entry, prev, split_log_id(prev)[0], token_ids, **options))
        return answer

    # --- looking ---

    def end_call(self, uid: str, attempt: int | None = None) -> Call[replies.Ended]:
        return replies.end(self.keys, uid, Delta(0, [], "", finish="stop"), attempt=attempt)

    def end(self, uid: str, attempt: int | None = None) -> str:
        return self.run(self.end_call(uid, attempt))

    def last(self, uid: str) -> LogId:
        return self.run(replies.last_id(self.keys, uid))

    def log(self, uid: str) -> list[replies.LogEntry]:
        return self.run(replies.read_log(self.keys, uid))

    def tokens(self, uid: str) -> list[int]:
        """Give all tokens of a log, those told before it was opened included."""
        found: list[int] = []
        for entry in self.log(uid):
            match entry:
                case replies.OpenEntry(said=Said() as said):
                    found += said.token_ids
                case replies.TokensEntry() | replies.EndEntry():
                    found += entry.delta.token_ids
        return found

    def rings(self, replica: str = REPLICA) -> list[replies.Ring]:
        return self.run(replies.read_inbox(self.keys, replica, block_ms=0)).rings

    def ttl_ms(self, key: str) -> int:
        return int(self.redis("PTTL", key))

    def state(self) -> dict[bytes, Any]:
        """Give the content of all keys, without the times that a mere look changes."""
        read = {b"stream": ("XRANGE", "-", "+"), b"hash": ("HGETALL",), b"string": ("GET",)}
        found: dict[bytes, Any] = {}
        for key in find_keys(self.broker):
            name, *arguments = read[bytes(self.redis("TYPE", key))]
            found[key] = self.redis(name, key, *arguments)
        tokenize = self.keys.tokenize(MODEL).encode()
        if tokenize in found and self.redis("XINFO", "GROUPS", tokenize):
            found[tokenize + b" pending"] = [p[:2] for p in self._pending(tokenize)]
        return found

    def _pending(self, stream: bytes) -> list[list[Any]]:
        pending: list[list[Any]] = self.redis("XPENDING", stream, "tokenizers", "-", "+", 100)
        return pending
