"""The events of a stream that can be resumed: each entry of a log becomes the same events, whoever writes them.

What a plain stream merges as it pleases is here written entry by entry, and every event gets the id that leads back
to it. Formats see choices that know no more than what was written so far, so that nothing in an event depends on how
far its writer had read. A client that comes back is told nothing twice: what it has is rendered and thrown away.
"""

from collections.abc import Iterable
from typing import Final

import msgspec

from services.api.exchange import Choice, Exchange
from services.api.formats import make_format
from services.api.job import Job
from services.api.places import Place, Position
from shared.messages import Delta, ErrorBody

_END: Final = b"\n\n"


class Numbered:
    """Writes one stream for one reader, from its beginning or from behind an event.

    Attributes:
        num_told: tokens of the events that were given.
        astray: the reader's position turned out to be none of this stream, or of what the broker has left of it.
    """

    def __init__(self, job: Job, start: Position | None = None, last: str = "begin.0") -> None:
        """Prepare.

        Args:
            job: whose answer it is.
            start: what the reader has; None for nothing.
            last: id of the last event it has.
        """
        self._view = Exchange(job, 0)
        self._form = make_format(self._view, job.fingerprint)
        self._last = last
        self._begun = 0
        self._places = [Place() for _ in self._view.choices]
        self._texts = [place.text() for place in self._places]
        self._stage = "begin" if start is None else start.stage
        self._begun_before = start.begun if start is not None else 0
        self._starts: list[Place | None] = [None for _ in self._places]
        if start is not None and start.stage == "body":
            self._starts = list(start.places)
        self._skips_body = self._stage in ("usage", "end")
        self.num_told = 0
        self.astray = False

    def begin(self) -> bytes:
        """Give what comes before the first entry of any log."""
        out = []
        for event in _split(self._form.begin()):
            self._begun += 1
            if self._stage == "begin" and self._begun > self._begun_before:
                out.append(self._number(event, f"begin.{self._begun}"))
        return b"".join(out)

    def entries(self, batch: Iterable[tuple[Choice, Delta]]) -> bytes:
        """Give the events of entries, in order, but for what the reader has."""
        return b"".join([self._entry(choice.index, part) for choice, delta in batch for part in _parts(delta)])

    def end(self) -> bytes:
        """Give what follows the finish of all choices."""
        if self._stage == "end":
            return b""
        if any(self._starts):
            self.astray = True
            return b""
        *before, done = _split(self._form.end())
        usage = b"" if self._stage == "usage" else b"".join(self._number(event, "usage") for event in before)
        return usage + self._number(done, "end")

    def error(self, error: ErrorBody, *, final: bool) -> bytes:
        """Give the error event: with `final` nothing can ever follow it, else coming back may help."""
        return b"".join(
            self._number(event, "end" if final else self._last) for event in _split(self._form.error(error))
        )

    def _entry(self, index: int, delta: Delta) -> bytes:
        place, start = self._places[index], self._starts[index]
        if self._skips_body or self.astray:
            self._render(index, delta)
            return b""
        told = 0
        if start is not None:
            seen, rest = _cut(delta, place, start)
            if seen is not None:
                self._pass(index, seen, start)
            if rest is None or self.astray:
                return b""
            if (place.tokens, place.chars) != (start.tokens, start.chars):
                self.astray = True  # the choice ends before the place that was named
                return b""
            told, delta = start.events, rest
            self._starts[index] = None
        self.num_told += len(delta.token_ids)
        events = self._render(index, delta)
        names = [place.text(number) for number in range(1, len(events))]
        self._move(index, delta)
        names.append(self._texts[index])
        pairs = zip(events[told:], names[told:], strict=False)
        return b"".join([self._number(event, self._id(index, name)) for event, name in pairs])

    def _pass(self, index: int, seen: Delta, start: Place) -> None:
        """Render what the reader has for the state it leaves behind, and check that it is the same."""
        place = self._places[index]
        self._render(index, seen)
        self._move(index, seen)
        if start.ended and place.ended:
            self._starts[index] = None
            self.astray = self.astray or (place.tokens, place.chars) != (start.tokens, start.chars)
        if place.tokens == start.tokens and place.digest != start.digest:
            self.astray = True

    def _render(self, index: int, delta: Delta) -> list[bytes]:
        choice = self._view.choices[index]
        choice.take_in(delta)
        ended = delta if delta.finish is not None else None
        return _split(self._form.delta(choice, delta.text, delta.logprobs, ended))

    def _move(self, index: int, delta: Delta) -> None:
        place = self._places[index]
        place.move(delta.token_ids, delta.text)
        place.ended = delta.finish is not None
        self._texts[index] = place.text()

    def _id(self, index: int, text: str) -> str:
        if len(self._texts) == 1:
            return text
        return "-".join([*self._texts[:index], text, *self._texts[index + 1 :]])

    def _number(self, event: bytes, name: str) -> bytes:
        self._last = name
        return b"id: %s\n%s" % (name.encode(), event)


def _parts(delta: Delta) -> tuple[Delta, ...]:
    """Part the last tokens of a choice from its finish, as a reader may be cut off between the two."""
    if delta.finish is None or not (delta.token_ids or delta.text):
        return (delta,)
    tokens = msgspec.structs.replace(delta, finish=None)
    return tokens, Delta(delta.first + len(delta.token_ids), [], "", finish=delta.finish)


def _cut(delta: Delta, place: Place, start: Place) -> tuple[Delta | None, Delta | None]:
    """Divide an entry into what a reader who is at `start` has, and the rest; `place` is where the entry begins."""
    if start.ended:
        return delta, None
    tokens = min(len(delta.token_ids), max(0, start.tokens - place.tokens))
    chars = min(len(delta.text), max(0, start.chars - place.chars))
    if not tokens and not chars:
        return None, delta
    if tokens == len(delta.token_ids) and chars == len(delta.text):
        return delta, None
    replace = msgspec.structs.replace
    seen = replace(delta, token_ids=delta.token_ids[:tokens], text=delta.text[:chars], logprobs=delta.logprobs[:tokens])
    rest = replace(
        delta, first=delta.first + tokens, token_ids=delta.token_ids[tokens:], text=delta.text[chars:],
        logprobs=delta.logprobs[tokens:], prompt=[],
    )  # fmt: skip
    return seen, rest


def _split(events: bytes) -> list[bytes]:
    """Take written events apart; their data has no empty line in it, as it is JSON."""
    return [event + _END for event in events.split(_END)[:-1]]
