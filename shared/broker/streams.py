"""The streams a request travels through: tokenize, generate, tokens.

Owns the calls on them. Knows nothing of sockets, nor of what services do between two calls; the rules they
follow are in docs/protocol.md. Nothing unread is ever trimmed: a stream is emptied by its reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from shared.broker.call import MAX_BLOCK_MS as MAX_BLOCK_MS
from shared.broker.call import Argument, Call, blocking, call_script, load_script, pairs, word, xread
from shared.broker.limits import Claim, Levels, read_levels
from shared.broker.log_id import NO_LOG, LogId
from shared.keys import ENDED_TTL_MS, GENERATE_TTL_MS, REPLY_TTL_MS, TOKENIZER_GROUP, Keys
from shared.messages import GenerateRequest, ReplyHeader, Said, StepChunk, TokenizeRequest, encode

Why = Literal["new", "crash", "drain", "self"]
"""Why an engine got a request: from the queue, from a dead engine, from a draining one, or restarted by itself."""
Moved = Literal["OK", "NOENGINE", "DUP"]
Taken = Literal["OK", "NOENGINE", "NONE", "DROPPED"]

FIRST: Final = b"0-0"
"""Position before the first entry of any stream."""

_OPEN, _MOVE, _TAKE = load_script("open", "limits"), load_script("move"), load_script("take")
_CLAIM, _DISCARD, _FORGET = load_script("claim"), load_script("discard"), load_script("forget")
_HELD, _BACKLOG = load_script("held"), load_script("backlog")


@dataclass(frozen=True, slots=True)
class Choice:
    """One uid to open, and what the api knows of it.

    Attributes:
        expect: last id its log must have; NO_LOG for a new uid or one whose log is gone.
        seen: highest attempt ever seen in its log; the new one is above it.
        said: what the client was told already (a repair after lost data), or None.
    """

    uid: str
    header: ReplyHeader
    expect: LogId = NO_LOG
    seen: int = 0
    said: Said | None = None


class Opened(NamedTuple):
    """Answer of `open_request`.

    Attributes:
        outcome: OK; CHANGED (choice number `changed` has `log_ids[0]` as its last id: read that log);
            FULL and LIMITED (the key's limits forbid it; `limited` says which): nothing was queued.
        entry: id in the tokenize stream.
        log_ids: per choice the id of its `o` entry.
        levels: what is left of the key's limits; None without a claim.
    """

    outcome: Literal["OK", "CHANGED", "FULL", "LIMITED"]
    entry: bytes = b""
    log_ids: Sequence[LogId] = ()
    changed: int = -1
    limited: str = ""
    levels: Levels | None = None


class QueueEntry(NamedTuple):
    """An entry of a tokenize stream; `payload` is a TokenizeRequest, `deliveries` counts claims and reads."""

    entry_id: bytes
    uids: list[str]
    payload: bytes
    deliveries: int = 1


class GenerateEntry(NamedTuple):
    """An entry of an engine's stream; `payload` is a GenerateRequest. To have the entry is to own the request."""

    entry_id: bytes
    uid: str
    payload: bytes
    why: Why


class TokensEntry(NamedTuple):
    """An entry of a tokens stream; `payload` is a StepChunk, and empty in an entry that is none of ours."""

    shard: int
    entry_id: bytes
    payload: bytes


class Backlog(NamedTuple):
    """How much is unread in a stream, and for how long, by the server's clock."""

    length: int
    age_s: float


# --- the api -----------------------------------------------------------------------------------------------


def open_request(
    keys: Keys, request: TokenizeRequest, choices: Sequence[Choice], *, cap: int | None, claim: Claim | None = None
) -> Call[Opened]:
    """Open the logs of all choices of a request and queue it, whole or not at all.

    After a lost answer call it again: CHANGED says that a log is there, and reading it shows the `o` entry.

    Args:
        keys: names of the installation.
        request: what is queued; its `uids` are those of `choices`.
        choices: at most 2,048, in the order of `request.uids`.
        cap: entries the queue may hold; None for a repair, which is never refused.
        claim: what it takes of its API key's limits; None where there are none, and for a repair.
    """
    arguments: list[Argument] = [len(choices), "" if cap is None else cap, REPLY_TTL_MS, encode(request)]
    for c in choices:
        said = 0 if c.said is None else len(c.said.token_ids)
        told = b"" if c.said is None else encode(c.said)
        life = max(c.header.resumable_ms, ENDED_TTL_MS)
        arguments += [c.uid, c.expect, c.seen, said, encode(c.header), c.header.replica, life, told]
    names = [*(keys.reply(c.uid) for c in choices), keys.tokenize(request.model)]
    if claim is not None:
        names, arguments = names + claim.keys(keys), arguments + claim.arguments()
    return call_script(_OPEN, names, arguments, _parse_opened)


def is_queued(keys: Keys, model: str, entry_id: bytes) -> Call[bool]:
    """Ask whether an entry is still in the tokenize stream, read or not."""
    return Call(("XRANGE", keys.tokenize(model), entry_id, entry_id), bool)


# --- tokenizers --------------------------------------------------------------------------------------------


def read_queue(keys: Keys, model: str, consumer: str, *, count: int, block_ms: int = 0) -> Call[list[QueueEntry]]:
    """Read entries that no tokenizer has had; blocks up to `block_ms` (0: not at all). Makes the group if needed."""
    return _read_group(keys, model, consumer, ">", count, block_ms)


def read_own(keys: Keys, model: str, consumer: str, *, count: int, after: bytes = FIRST) -> Call[list[QueueEntry]]:
    """Read again what this consumer was given and has neither moved nor discarded: after every lost connection."""
    return _read_group(keys, model, consumer, after, count, 0)


def list_consumers(keys: Keys, model: str) -> Call[dict[str, int]]:
    """List the group's consumers with the number of entries each has pending."""
    stream = keys.tokenize(model)
    return Call(("XINFO", "CONSUMERS", stream, TOKENIZER_GROUP), _parse_consumers, group=(stream, TOKENIZER_GROUP))


def claim_one(keys: Keys, model: str, dead: str, consumer: str) -> Call[QueueEntry | None]:
    """Take over the oldest entry of a dead consumer; None when it has none (or had one that was deleted).

    Claim one, process it alone, then claim the next: whatever killed its reader shows in `deliveries`.
    """
    stream = keys.tokenize(model)
    group = (stream, TOKENIZER_GROUP)
    return call_script(_CLAIM, [stream], [TOKENIZER_GROUP, dead, consumer], _parse_claimed, group=group)


def forget_consumer(keys: Keys, model: str, dead: str) -> Call[bool]:
    """Remove a dead consumer from the group; False, and nothing done, while it has entries pending."""
    stream = keys.tokenize(model)
    return call_script(_FORGET, [stream], [TOKENIZER_GROUP, dead], bool, group=(stream, TOKENIZER_GROUP))


def move(keys: Keys, model: str, entry_id: bytes, engine: str, requests: Sequence[GenerateRequest]) -> Call[Moved]:
    """Hand a tokenized request, with all its choices, to one engine.

    OK, and DUP when somebody else has done it (also this call's lost first run): forget the entry.
    NOENGINE: the engine is not registered; choose another one.
    """
    names = [keys.tokenize(model), keys.generate(engine), keys.alive("scheduler")]
    arguments: list[Argument] = [entry_id, engine, TOKENIZER_GROUP, GENERATE_TTL_MS]
    for request in requests:
        names.append(keys.reply(request.uid))
        arguments += [request.uid, encode(request)]
    return call_script(_MOVE, names, arguments, word)


def discard(keys: Keys, model: str, entry_id: bytes) -> Call[bool]:
    """Acknowledge and delete an entry whose uids are all ended. False when it was gone."""
    return call_script(_DISCARD, [keys.tokenize(model)], [TOKENIZER_GROUP, entry_id], bool)


# --- engines -----------------------------------------------------------------------------------------------


def read_generate(
    keys: Keys, engine: str, *, after: bytes = FIRST, count: int = 64, block_ms: int = 0
) -> Call[list[GenerateEntry]]:
    """Read an engine's stream from a position on; the entries stay. Also used to look into a dead engine's."""
    return Call(
        xread({keys.generate(engine): after}, count, block_ms),
        lambda answer: [
            _generate_entry(entry_id, fields) for _, entries in answer or () for entry_id, fields in entries
        ],
        blocks=block_ms > 0,
    )


def list_held(keys: Keys, engine: str) -> Call[list[tuple[bytes, str]]]:
    """List (entry id, uid) of everything in an engine's stream, without the payloads."""
    names = [keys.generate(engine)]
    return call_script(_HELD, names, [], lambda a: [(i, u.decode(errors="replace")) for i, u in pairs(a)])


def read_generate_entry(keys: Keys, engine: str, entry_id: bytes) -> Call[GenerateEntry | None]:
    """Read one entry of an engine's stream; None when it is gone."""
    return Call(
        ("XRANGE", keys.generate(engine), entry_id, entry_id),
        lambda answer: _generate_entry(*answer[0]) if answer else None,
    )


def drop_generate(keys: Keys, engine: str, entry_ids: Sequence[bytes]) -> Call[int]:
    """Delete entries whose uids are ended, gone or taken over. Answers how many were there."""
    return Call(("XDEL", keys.generate(engine), *entry_ids), int)


def take(keys: Keys, source: str, entry_id: bytes, uid: str, target: str, why: Why) -> Call[Taken]:
    """Move an entry to another engine's stream: the takeover of a dead engine, or the handover of a draining one.

    OK; NONE: somebody else was faster (or this call's lost first run); DROPPED: the uid had ended or its log is
    gone, so the entry was deleted; NOENGINE: the target is not registered.
    """
    names = [keys.generate(source), keys.generate(target), keys.alive("scheduler"), keys.reply(uid)]
    return call_script(_TAKE, names, [entry_id, target, why, GENERATE_TTL_MS], word)


def publish_tokens(keys: Keys, model: str, shard: int, chunk: StepChunk) -> Call[bytes]:
    """Add a step's tokens to a shard; answers the entry's id. A second copy, after a lost answer, does no harm."""
    return Call(("XADD", keys.tokens(model, shard), "*", "m", encode(chunk)), bytes)


def has_tokens_until(keys: Keys, model: str, shard: int, entry_id: bytes) -> Call[bool]:
    """Ask whether a shard still holds anything up to an entry, that is: whether it may not have been said yet."""
    return Call(("XRANGE", keys.tokens(model, shard), "-", entry_id, "COUNT", 1), bool)


# --- detokenizers ------------------------------------------------------------------------------------------


def read_tokens(
    keys: Keys, model: str, positions: Mapping[int, bytes], *, count: int, block_ms: int = 0
) -> Call[list[TokensEntry]]:
    """Read several shards from their positions on, up to `count` entries of each; the entries stay.

    Args:
        keys: names of the installation.
        model: served model name.
        positions: shard -> id of the last entry read; FIRST at the start and after every lost connection.
        count: entries per shard.
        block_ms: wait this long for the first entry; 0 does not wait.
    """
    shards = {keys.tokens(model, shard).encode(): shard for shard in positions}

    def parse(answer: Any) -> list[TokensEntry]:
        return [
            TokensEntry(shards[key], entry_id, dict(pairs(fields)).get(b"m", b""))
            for key, entries in answer or ()
            for entry_id, fields in entries
        ]

    streams = {keys.tokens(model, shard): position for shard, position in positions.items()}
    return Call(xread(streams, count, block_ms), parse, blocks=block_ms > 0)


def drop_tokens(keys: Keys, model: str, shard: int, entry_ids: Sequence[bytes]) -> Call[int]:
    """Delete step entries of which everything is said."""
    return Call(("XDEL", keys.tokens(model, shard), *entry_ids), int)


# --- anybody -----------------------------------------------------------------------------------------------


def length(stream: str) -> Call[int]:
    """Count the entries of a stream."""
    return Call(("XLEN", stream), int)


def backlog(stream: str) -> Call[Backlog]:
    """Measure what is unread in a stream (pending entries of the group included)."""
    return call_script(_BACKLOG, [stream], [], lambda answer: Backlog(answer[0], answer[1] / 1000))


# --- answers -----------------------------------------------------------------------------------------------


def _read_group(
    keys: Keys, model: str, consumer: str, after: str | bytes, count: int, block_ms: int
) -> Call[list[QueueEntry]]:
    stream = keys.tokenize(model)
    how = ("COUNT", count, *blocking(block_ms))
    command = ("XREADGROUP", "GROUP", TOKENIZER_GROUP, consumer, *how, "STREAMS", stream, after)
    return Call(command, _parse_queue, group=(stream, TOKENIZER_GROUP), blocks=block_ms > 0)


def _queue_entry(entry_id: bytes, fields: Sequence[bytes], deliveries: int = 1) -> QueueEntry:
    # As below, a stranger's entry is for its reader to bury: it must not make the whole answer unreadable.
    uids = [value.decode(errors="replace") for key, value in pairs(fields) if key == b"u"]
    return QueueEntry(entry_id, uids, dict(pairs(fields)).get(b"m", b""), deliveries)


def _generate_entry(entry_id: bytes, fields: Sequence[bytes]) -> GenerateEntry:
    found = dict(pairs(fields))  # a field may be missing where a stranger has written: the reader then buries it
    why: Why = found.get(b"w", b"new").decode(errors="replace")  # type: ignore[assignment]  # by our scripts alone
    return GenerateEntry(entry_id, found.get(b"u", b"").decode(errors="replace"), found.get(b"m", b""), why)


def _parse_queue(answer: Any) -> list[QueueEntry]:
    entries = [entry for _, entries in answer or () for entry in entries]
    return [_queue_entry(entry_id, fields) for entry_id, fields in entries if fields]  # none: deleted while pending


def _parse_claimed(answer: Any) -> QueueEntry | None:
    return None if answer is None else _queue_entry(*answer)


def _parse_opened(answer: Any) -> Opened:
    match answer:
        case [b"OK", entry, levels, *ids]:
            return Opened("OK", entry, ids, levels=read_levels(levels) if levels else None)
        case [b"CHANGED", place, last]:
            return Opened("CHANGED", log_ids=[last], changed=place)
        case [b"LIMITED", why, levels]:
            return Opened("LIMITED", limited=why.decode(), levels=read_levels(levels))
        case _:
            return Opened("FULL")


def _parse_consumers(answer: Any) -> dict[str, int]:
    found = [dict(pairs(flat)) for flat in answer]
    return {consumer[b"name"].decode(errors="replace"): consumer[b"pending"] for consumer in found}
