"""Ids of the events of a stream that can be resumed: what a client has, once it has seen an event.

An id says, per choice, how many tokens and characters were told, with a digest of the tokens, so that the rest
follows from the logs alone: whoever wrote the events, and wherever their borders fell. Clients hand ids back and
need not understand them. Knows no log and no format.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from shared.errors import InvalidRequest

Stage = Literal["begin", "body", "usage", "end"]

HEADER: Final = "Last-Event-ID"
QUERY: Final = "last_event_id"
_PLACE: Final = re.compile(r"(\d{1,9})\.(\d{1,12})\.([0-9a-f]{8})(?:\.(e|\d{1,6}))?", re.ASCII)
_BEGIN: Final = re.compile(r"begin\.(\d{1,6})", re.ASCII)


@dataclass(slots=True)
class Place:
    """How far one choice was told.

    Attributes:
        tokens, chars: told.
        digest: of those tokens.
        events: of the next entry of the log, so many events were told already.
        ended: its finish was told too.
    """

    tokens: int = 0
    chars: int = 0
    digest: int = 0
    events: int = 0
    ended: bool = False

    def move(self, token_ids: Sequence[int], text: str) -> None:
        """Go on by what was told."""
        self.tokens += len(token_ids)
        self.chars += len(text)
        for token in token_ids:
            self.digest = zlib.crc32(token.to_bytes(4, "little"), self.digest)

    def text(self, events: int = 0) -> str:
        """Write it, as it is after some events of the next entry."""
        more = ".e" if self.ended else f".{events}" if events else ""
        return f"{self.tokens}.{self.chars}.{self.digest:08x}{more}"


@dataclass(slots=True)
class Position:
    """How far a stream was told.

    Attributes:
        stage: `begin`: only `begun` of the events before the first token; `body`: as `places` say, one per choice;
            `usage`: all but the end mark; `end`: everything.
    """

    stage: Stage
    begun: int = 0
    places: list[Place] = field(default_factory=list)


def parse_position(text: str, num_choices: int) -> Position:
    """Read an id that a client hands back.

    Raises:
        InvalidRequest: it is none of a stream with so many choices.
    """
    if text in ("usage", "end"):
        return Position("usage" if text == "usage" else "end")
    begin = _BEGIN.fullmatch(text)
    if begin is not None:
        return Position("begin", int(begin[1]))
    found = [_PLACE.fullmatch(part) for part in text.split("-", num_choices)]
    if len(found) != num_choices or not all(found):
        raise no_such_place()
    places = []
    for match in filter(None, found):
        tokens, chars, digest, rest = match.groups()
        events = 0 if rest in (None, "e") else int(rest)
        places.append(Place(int(tokens), int(chars), int(digest, 16), events, rest == "e"))
    return Position("body", places=places)


def no_such_place() -> InvalidRequest:
    """Make the error of an id that names no place in its stream."""
    return InvalidRequest.of_field(HEADER, "names no event of this stream")
