"""How calls become answers, whatever carries them: repetition after a remedy, and the meaning of every error.

Owns no socket. `converse` is a generator that yields lists of commands and is sent their answers, so that threads
and event loops share it.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeAlias

import redis.exceptions as rx

from shared.broker.call import Argument, Call, load_script
from shared.errors import BrokerDown, BrokerError, BrokerFull
from shared.keys import ASIDE_TTL_MS, Keys

Commands: TypeAlias = list[Sequence[Argument]]

LOST: Final = (rx.ConnectionError, rx.TimeoutError, rx.InvalidResponse, OSError)
"""What the library raises when a connection is of no more use."""

_MAX_REMEDIES: Final = 3

# The library turns some of these words into classes, and scripts of older servers put text in front of them.
_DOWN_WORDS: Final = re.compile(
    r"(?:^|[ :-])(READONLY|LOADING|MASTERDOWN|MISCONF|NOREPLICAS|UNBLOCKED|NOGROUP|NOSCRIPT|BUSY|TRYAGAIN)\b"
)
_FULL_WORD: Final = re.compile(r"(?:^|[ :-])OOM\b")
_WRONG_KIND: Final = re.compile(r"(?:^|[ :-])WRONGTYPE\b")
_HEAL: Final = load_script("heal").text
_NO_GROUP: Final = re.compile(r"NOGROUP|UNBLOCKED|no such key")
_DOWN_CLASSES: Final = (*LOST, rx.ReadOnlyError, rx.NoScriptError, rx.ClusterDownError, rx.TryAgainError)
_REFUSED_CLASSES: Final = (rx.AuthenticationError, rx.AuthorizationError, rx.NoPermissionError)


def converse(
    calls: Sequence[Call[Any]], keys: Keys, on_strange: Callable[[list[bytes]], None] = lambda _: None
) -> Generator[Commands, list[Any], list[Any]]:
    """Make calls in order: yields commands for one round trip, is sent their answers (errors among them).

    A call that the server refused because it had forgotten a script or a group, or because a key of ours holds
    what a stranger has put there, is made again after the remedy, and so is everything behind it, to keep the
    order; but a read as a group that has succeeded is not repeated, because it has moved on.

    Args:
        calls: at least one.
        keys: tell which words of a command are names of ours.
        on_strange: told the names under which something else was found; it was put aside.

    Raises:
        BrokerError: of the first call that failed, as `translate` tells it.
    """
    answers = yield [call.command for call in calls]
    for _ in range(_MAX_REMEDIES):
        found = [_remedy(call, answer, keys) for call, answer in zip(calls, answers, strict=True)]
        remedies = list(dict.fromkeys(remedy for remedy in found if remedy is not None))
        if not remedies:
            break
        first = next(i for i, remedy in enumerate(found) if remedy is not None)
        again = [i for i in range(first, len(calls)) if calls[i].group is None or isinstance(answers[i], Exception)]
        replies = yield [*remedies, *(calls[i].command for i in again)]
        for remedy, reply in zip(remedies, replies, strict=False):
            if remedy[1] is _HEAL and isinstance(reply, list) and reply:
                on_strange(reply)
        for i, reply in zip(again, replies[len(remedies) :], strict=True):
            answers[i] = reply
    for answer in answers:
        if isinstance(answer, Exception):
            raise translate(answer) from answer
    return [call.parse(answer) for call, answer in zip(calls, answers, strict=True)]


def translate(error: Exception) -> BrokerError:
    """Say what an error of the library means to a service. Its text holds no argument of any command."""
    text = f"{type(error).__name__}: {str(error).partition(', with args')[0]}"
    if isinstance(error, _REFUSED_CLASSES):
        return BrokerError(f"the broker refuses this user: {text}")
    if isinstance(error, rx.OutOfMemoryError) or _FULL_WORD.search(str(error)):
        return BrokerFull(text)
    if isinstance(error, _DOWN_CLASSES) or _DOWN_WORDS.search(str(error)):
        return BrokerDown(text)
    return BrokerError(text)


def _remedy(call: Call[Any], answer: Any, keys: Keys) -> tuple[Argument, ...] | None:
    """Give the command after which a refused call will run, if the server has only forgotten or mistaken something."""
    if not isinstance(answer, rx.ResponseError):
        return None
    if call.script is not None and isinstance(answer, rx.NoScriptError):
        return ("SCRIPT", "LOAD", call.script.text)
    if call.group is not None and _NO_GROUP.search(str(answer)):
        return ("XGROUP", "CREATE", *call.group, "0", "MKSTREAM")  # from 0: what is queued must not be skipped
    if _WRONG_KIND.search(str(answer)):
        names = [word for word in call.command if isinstance(word, str)]
        ours = {name: kind for name in names if (kind := keys.kind_of(name)) is not None}
        return ("EVAL", _HEAL, 2 * len(ours), *ours, *map(keys.aside, ours), ASIDE_TTL_MS, *ours.values())
    return None
