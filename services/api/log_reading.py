"""What a reply log says beside what a client was told: continue from it, open it again, or give up.

Pure functions over the entries of one log. The log is the truth about a request as long as it agrees with what
the client was told; what was told is above it, because it cannot be taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shared.broker.log_id import NO_LOG, LogId, is_end, split_log_id
from shared.broker.replies import EndEntry, LogEntry, OpenEntry, TokensEntry
from shared.messages import Delta, Said

Verdict = Literal["continue", "reopen", "lost"]


@dataclass(slots=True)
class Reading:
    """What to do with a log.

    Attributes:
        verdict: `continue`: say `fresh`, in order. `reopen`: the log is gone or disagrees with what was said; open
            it again over `last`. `lost`: it disagrees and has ended well, so the answer cannot be completed.
        last: id of the last entry that holds nothing new (continue), or of the last one at all (reopen).
        fresh: entries that follow on what was said.
        attempt: the highest attempt in the log, terminals aside.
        entry: id of the tokenize entry that the log was opened with.
    """

    verdict: Verdict
    last: LogId = NO_LOG
    fresh: list[tuple[LogId, Delta]] = field(default_factory=list)
    attempt: int = 0
    entry: bytes = b""


def _tokens(entry: LogEntry) -> list[int]:
    if isinstance(entry, TokensEntry | EndEntry):
        return entry.delta.token_ids
    if isinstance(entry, OpenEntry) and entry.said is not None:
        return entry.said.token_ids
    return []


def read(entries: Sequence[LogEntry], said: Sequence[int], num_chars: int = 0) -> Reading:
    """Compare a whole log with the token ids that its client was told, in so many characters.

    Invariant of the loop: `count` tokens of the log lie before the entry at hand; the first len(said) of the log
    equal `said`, so an entry is either told already, or begins exactly where the telling stopped, or straddles
    that point (two flushes that were cut differently), which no text can be taken out of. Only of a stream that
    several follow can the log have been opened again with more than was told here.
    """
    if not entries:
        return Reading("reopen")
    attempt = max((split_log_id(e.log_id)[0] for e in entries if not is_end(e.log_id)), default=0)
    entry = next((e.tokenize_id for e in entries if isinstance(e, OpenEntry)), b"")
    logged = [token for e in entries for token in _tokens(e)]
    final = entries[-1]
    disagrees = logged[: len(said)] != list(said)
    if disagrees and isinstance(final, EndEntry):
        if final.delta.error is not None:
            return Reading("continue", final.log_id, [(final.log_id, final.delta)], attempt, entry)
        return Reading("lost", final.log_id, [], attempt, entry)
    if disagrees:
        return Reading("reopen", final.log_id, [], attempt, entry)
    reading = _continue(entries, len(said), attempt, entry)
    head = entries[0]
    if reading.verdict == "continue" and isinstance(head, OpenEntry) and head.said is not None:
        more = _rest(head.said, len(said), num_chars)
        if more is not None:
            reading.fresh.insert(0, (head.log_id, more))
            reading.last = NO_LOG
    return reading


def _rest(told: Said, num_tokens: int, num_chars: int) -> Delta | None:
    """Give what a log was opened again with beyond what was told here."""
    if len(told.token_ids) <= num_tokens:
        return None
    return Delta(
        num_tokens + 1,
        told.token_ids[num_tokens:],
        told.text[num_chars:],
        told.logprobs[num_tokens:],
        prompt_tokens=told.prompt_tokens,
        cached_tokens=told.cached_tokens,
        prompt=[] if num_tokens else told.prompt,
    )


def follow(entries: Sequence[LogEntry], last: LogId) -> Reading | None:
    """Continue from the last entry that was said, if the log still has it; None when only all of the log can tell.

    An attempt has one engine's tokens and no attempt comes back, so a log that holds an entry which was said holds
    all that was said before it.

    Args:
        entries: of the log, from `last` on.
        last: id of the last entry that was said.
    """
    if not entries or entries[0].log_id != last:
        return None
    attempt = max(split_log_id(e.log_id)[0] for e in entries if not is_end(e.log_id))
    return _continue(entries[1:], 0, attempt, b"", last)


def _continue(
    entries: Sequence[LogEntry], told: int, attempt: int, tokenize_id: bytes, last: LogId = NO_LOG
) -> Reading:
    reading = Reading("continue", last, [], attempt, tokenize_id)
    count = 0
    for e in entries:
        before, count = count, count + len(_tokens(e))
        if isinstance(e, TokensEntry | EndEntry) and (count > told or isinstance(e, EndEntry)):
            if before < told < count:
                return Reading("reopen", entries[-1].log_id, [], attempt, tokenize_id)
            reading.fresh.append((e.log_id, e.delta))
        elif not reading.fresh:
            reading.last = e.log_id
    return reading
