"""The reply log of a uid and the inbox of an api replica.

The log is the truth about a request. Its last id is its whole state, and every write is one compare-and-append
on that id; the inbox only rings. Owns the calls and what their answers mean, nothing of when they are made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from shared.broker.call import MAX_BLOCK_MS, Argument, Call, call_script, load_script, pairs, word, xread
from shared.broker.log_id import NO_LOG, LogId
from shared.broker.rings import Ring as Ring
from shared.broker.rings import Rings, parse_rings
from shared.broker.streams import FIRST, Why
from shared.errors import WireError
from shared.keys import (
    ABORT_TTL_MS,
    ENDED_TTL_MS,
    INBOX_CAP,
    INBOX_TTL_MS,
    REPLY_HELD_TTL_MS,
    REPLY_TTL_MS,
    Keys,
)
from shared.messages import Delta, FenceHeader, ReplyHeader, Said, decode, encode

MAX_LAUNCHES: Final = 3
"""Launches without a new token after which a request is given up as poison."""

FenceOutcome = Literal["OK", "LOST", "GONE", "ENDED", "POISON", "SUSPECT"]
Ended = Literal["OK", "GONE", "ENDED", "FENCED"]

_FENCE, _END = load_script("fence"), load_script("end", "terminal")
_AUDIT, _SWEEP = load_script("audit"), load_script("sweep")


# --- speaking ----------------------------------------------------------------------------------------------


class Fenced(NamedTuple):
    """Answer of `fence`.

    Attributes:
        outcome: OK; LOST (the entry is not in this engine's stream: forget it); GONE and ENDED (no log, or a
            terminal: the entry is deleted); POISON (end it with an error); SUSPECT (ask again with `solo` when
            nothing else is in its first launch).
        attempt: number that every token published from now on carries.
        said: tokens in the log; the next one has index said + 1.
        launches: launches since the last token, this one included (a handover by a draining engine adds none to
            those before it).
    """

    outcome: FenceOutcome
    attempt: int = 0
    said: int = 0
    launches: int = 0


def fence(
    keys: Keys,
    uid: str,
    engine: str,
    entry_id: bytes,
    nonce: str,
    why: Why,
    header: FenceHeader,
    *,
    solo: bool,
    limit: int = MAX_LAUNCHES,
) -> Call[Fenced]:
    """Become the engine that speaks for a uid, before its first launch.

    Args:
        keys: names of the installation.
        uid: the request.
        engine: the caller, whose stream must hold the entry.
        entry_id: id of that entry.
        nonce: unique per intended fence; the same call sent twice gets the same answer.
        why: what the entry says, or "self" for a restart from the log.
        header: what a detokenizer must know from here on.
        solo: whether no other request would share its first launch; a suspect is fenced only then.
        limit: launches without a new token before it is POISON.
    """
    arguments: list[Argument] = [entry_id, nonce, why, encode(header), REPLY_TTL_MS, limit, int(solo)]
    return call_script(_FENCE, [keys.reply(uid), keys.generate(engine)], arguments, _parse_fenced)


def end(keys: Keys, uid: str, delta: Delta, *, attempt: int | None = None) -> Call[Ended]:
    """End a uid from outside its stream of tokens: abort, deadline, reject, error. The first terminal wins.

    Args:
        keys: names of the installation.
        uid: the request.
        delta: with `finish` or `error` set and no tokens; its `first` is not looked at.
        attempt: end it only while this attempt is the current one (an engine's own); None ends it in any case.
    """
    current: Argument = "" if attempt is None else attempt
    arguments: list[Argument] = [current, encode(delta), uid, ABORT_TTL_MS, keys.inbox(""), INBOX_CAP, INBOX_TTL_MS]
    return call_script(_END, [keys.reply(uid), keys.abort(uid)], arguments, word)


def audit(keys: Keys, uids: Sequence[str]) -> Call[list[LogId]]:
    """Say that these uids are held by a living engine, and learn the last id of each log (NO_LOG: gone)."""
    return call_script(_AUDIT, [keys.reply(uid) for uid in uids], [REPLY_HELD_TTL_MS], _as_is)


def delete_logs(keys: Keys, uids: Sequence[str]) -> Call[int]:
    """Delete logs whose terminal has been delivered (or whose client is gone)."""
    return Call(("DEL", *(keys.reply(uid) for uid in uids)), int)


# --- reading a log -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """`o`: the log begins here, with what the client was told before it was opened (again)."""

    log_id: LogId
    header: ReplyHeader
    said: Said | None
    tries: int
    tokenize_id: bytes


@dataclass(frozen=True, slots=True)
class FenceEntry:
    """`f`: from here on another engine, or attempt, speaks."""

    log_id: LogId
    header: FenceHeader
    tries: int
    nonce: str


@dataclass(frozen=True, slots=True)
class TokensEntry:
    """Tokens and text; the one kind that is not named."""

    log_id: LogId
    delta: Delta


@dataclass(frozen=True, slots=True)
class EndEntry:
    """`e`: the terminal, perhaps with the last tokens and text. completion_tokens is the `said` of its id."""

    log_id: LogId
    delta: Delta


LogEntry: TypeAlias = OpenEntry | FenceEntry | TokensEntry | EndEntry


class Glance(NamedTuple):
    """What a sweep sees of a log: its last id, and whether an engine has audited it since the last sweep."""

    last: LogId
    held: bool


def read_log(keys: Keys, uid: str, *, since: LogId = NO_LOG, count: int | None = None) -> Call[list[LogEntry]]:
    """Read a log from its beginning, or from an entry on, itself included. Empty: it is gone, or ends before that.

    Raises (when the answer is parsed):
        WireError: an entry is none of ours.
    """
    command: list[Argument] = ["XRANGE", keys.reply(uid), since or "-", "+"]
    if count is not None:
        command += ["COUNT", count]
    return Call(command, _parse_log)


def last_id(keys: Keys, uid: str) -> Call[LogId]:
    """Look at the state of a uid: the last id of its log, or NO_LOG."""
    return Call(
        ("XREVRANGE", keys.reply(uid), "+", "-", "COUNT", 1), lambda answer: LogId(answer[0][0]) if answer else NO_LOG
    )


def sweep(keys: Keys, uids: Sequence[str], *, several: bool = False) -> Call[list[Glance]]:
    """Look at logs that have been silent. Only the api that has the clients sweeps them.

    `several` for logs that other replicas may sweep too (resumable ones): they do not take each other's signs of an
    audit, but it takes 100 s longer until an audit that was missed is seen.
    """
    return call_script(
        _SWEEP,
        [keys.reply(uid) for uid in uids],
        [REPLY_TTL_MS, int(several)],
        lambda answer: [Glance(LogId(last), bool(held)) for last, held in pairs(answer)],
    )


def life_ms(header: ReplyHeader) -> int:
    """Say how long a log lives after its terminal."""
    return max(header.resumable_ms, ENDED_TTL_MS)


# --- the inbox ---------------------------------------------------------------------------------------------


def read_inbox(
    keys: Keys, replica: str, *, after: bytes = FIRST, count: int = 64, block_ms: int = MAX_BLOCK_MS
) -> Call[Rings]:
    """Read a replica's inbox from a position on; from FIRST after a lost connection and after a second of silence.

    Args:
        keys: names of the installation.
        replica: its incarnation.
        after: `position` of the last answer.
        count: flushes at most.
        block_ms: wait this long for the first; 0 does not wait.
    """
    command = xread({keys.inbox(replica): after}, count, block_ms)
    return Call(command, lambda answer: parse_rings(answer, after), blocks=block_ms > 0)


def trim_inbox(keys: Keys, replica: str, position: bytes) -> Call[int]:
    """Drop what a replica has read of its inbox, so that a look from FIRST finds only what it has not."""
    milliseconds, _, number = position.partition(b"-")
    after = b"%s-%d" % (milliseconds, int(number) + 1)
    return Call(("XTRIM", keys.inbox(replica), "MINID", after), int)


# --- answers -----------------------------------------------------------------------------------------------


def _as_is(answer: Any) -> Any:
    return answer


def _parse_fenced(answer: Any) -> Fenced:
    outcome, *numbers = answer
    return Fenced(outcome.decode(), *map(int, numbers))


def _parse_log(answer: Any) -> list[LogEntry]:
    return [_log_entry(LogId(entry_id), dict(pairs(flat))) for entry_id, flat in answer]


def _log_entry(log_id: LogId, fields: dict[bytes, bytes]) -> LogEntry:
    try:
        match fields.get(b"k"):
            case None:  # by far the most, so they say no more than they must
                return TokensEntry(log_id, decode(Delta, fields[b"t"]))
            case b"f":
                return FenceEntry(log_id, decode(FenceHeader, fields[b"h"]), int(fields[b"n"]), fields[b"e"].decode())
            case b"e":
                return EndEntry(log_id, decode(Delta, fields[b"t"]))
            case b"o":
                said = decode(Said, fields[b"t"]) if fields[b"t"] else None
                header = decode(ReplyHeader, fields[b"h"])
                return OpenEntry(log_id, header, said, int(fields[b"n"]), fields[b"q"])
            case kind:
                raise WireError(f"a reply log has an entry of kind {kind!r}")
    except KeyError as e:
        raise WireError(f"an entry of a reply log has no field {e}") from e
    except ValueError as e:  # a number, or a text, that is none
        raise WireError("an entry of a reply log has a field that is none of ours") from e
