"""What is said to the broker, apart from how: one command or script with its arguments, and what its answer means.

Knows neither sockets nor threads, so the same calls serve the threads of the scheduler and the event loop of
the api. Every call may be sent twice: a lost answer is cured by asking again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Argument: TypeAlias = str | bytes | int

MAX_BLOCK_MS: Final = 1_000
"""No read waits longer, so that a dead connection and a stop signal are seen in time."""

_LUA: Final = Path(__file__).parent / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, known to the server by the hash of its text."""

    name: str
    text: str
    sha: str


def load_script(name: str, *helpers: str) -> Script:
    """Read `lua/<name>.lua` and put in front of it the helpers that all scripts share, and others by name."""
    text = "".join((_LUA / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", *helpers, name))
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One command and the meaning of its answer.

    Attributes:
        command: the words sent to the server.
        parse: turns the server's answer (bytes, ints, lists, None) into T. Raises WireError on bytes of others.
        script: set when the command is an EVALSHA; loaded again when the server has forgotten it.
        group: (stream, group) that the command reads as; made anew, from the first entry, when it is gone.
        blocks: whether the server may wait before it answers, so that the call needs a connection of its own.
    """

    command: Sequence[Argument]
    parse: Callable[[Any], T]
    script: Script | None = None
    group: tuple[str, str] | None = None
    blocks: bool = False


def call_script(
    script: Script,
    keys: Sequence[str],
    arguments: Sequence[Argument],
    parse: Callable[[Any], T],
    *,
    group: tuple[str, str] | None = None,
) -> Call[T]:
    """Make the call that runs a script on some keys."""
    return Call(("EVALSHA", script.sha, len(keys), *keys, *arguments), parse, script=script, group=group)


def blocking(block_ms: int) -> tuple[Argument, ...]:
    """Give the words that make a read wait; none for 0, which to the server would mean for ever."""
    return ("BLOCK", min(block_ms, MAX_BLOCK_MS)) if block_ms > 0 else ()


def xread(positions: Mapping[str, bytes], count: int, block_ms: int) -> tuple[Argument, ...]:
    """Give the command that reads streams without a group, each from the id after its position."""
    return ("XREAD", "COUNT", count, *blocking(block_ms), "STREAMS", *positions, *positions.values())


def nothing(_: Any) -> None:
    """Parse an answer that says no more than that the command ran."""


def word(answer: bytes) -> Any:
    """Parse an answer that is one of a few words."""
    return answer.decode()


def pairs(flat: Sequence[T]) -> list[tuple[T, T]]:
    """Turn [a, 1, b, 2] into [(a, 1), (b, 2)]."""
    return list(zip(flat[::2], flat[1::2], strict=True))
