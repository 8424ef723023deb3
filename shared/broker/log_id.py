"""Ids in a reply log: `<attempt>-<said>`, where `said` is the number of tokens in the log up to that entry.

The attempt of a terminal is END_ATTEMPT, the largest there is, so nothing can follow it.
"""

from typing import Final, NewType

LogId = NewType("LogId", bytes)
"""Kept as the bytes the broker sends: ids are compared far more often than they are taken apart."""

NO_LOG: Final = LogId(b"")
"""The last id of a log that does not exist."""
END_ATTEMPT: Final = 9_007_199_254_740_991


def make_log_id(attempt: int, said: int) -> LogId:
    """Make the id of an entry after which `said` tokens are in the log."""
    return LogId(b"%d-%d" % (attempt, said))


def make_end_id(said: int) -> LogId:
    """Make the id of a terminal behind `said` tokens."""
    return LogId(b"%d-%d" % (END_ATTEMPT, said))


def split_log_id(log_id: LogId) -> tuple[int, int]:
    """Take an id apart: (attempt, said). They compare as ids do. NO_LOG is (0, 0), below all others."""
    if not log_id:
        return 0, 0
    attempt, said = log_id.split(b"-")
    return int(attempt), int(said)


def is_next(prev: LogId, log_id: LogId) -> bool:
    """Whether an id is one token behind `prev`, in the same attempt: no id fits between them."""
    cut = prev.find(b"-") + 1
    return cut > 0 and log_id.startswith(prev[:cut]) and int(log_id[cut:]) == int(prev[cut:]) + 1


def is_end(log_id: LogId) -> bool:
    """Whether this is the id of a terminal."""
    return log_id.startswith(b"9007199254740991-")
