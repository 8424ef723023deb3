"""Takes an answer apart as its text grows: thoughts, text, calls. The one place where that is done.

The state belongs to one choice and is a function of the text said so far, so that a log read again gives the same
parts, whoever reads it and however it was cut.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.api.answers.formats import READERS
from services.api.answers.text import Part
from services.api.answers.thoughts import ThoughtReader
from shared.dialect import Outline


class AnswerParser:
    """The parts of one answer."""

    def __init__(self, outline: Outline) -> None:
        """Begin; the outline says what is looked for."""
        self._thoughts = ThoughtReader(outline.thoughts) if outline.thoughts else None
        self._calls = READERS[outline.tools](outline.functions) if outline.tools else None
        self._only_one = not outline.parallel
        self._num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is still within its thoughts."""
        return self._thoughts is not None and self._thoughts.begun and not self._thoughts.closed

    @property
    def has_thought(self) -> bool:
        """Whether there were any thoughts."""
        return self._thoughts is not None and self._thoughts.begun

    def feed(self, text: str) -> list[Part]:
        """Take the next text; give what is certain by now."""
        return self._take(text, final=False)

    def finish(self) -> list[Part]:
        """Give what is left when nothing follows."""
        return self._take("", final=True)

    def _take(self, text: str, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._thoughts is not None:
            text = self._thoughts.feed(text, parts, final=final)
        if self._calls is not None:
            self._calls.feed(text, parts, final=final)
        elif text:
            parts.append(("content", text))
        return list(self._only_first(parts)) if self._only_one else parts

    def _only_first(self, parts: Iterable[Part]) -> Iterable[Part]:
        """Leave out every call but the first: the client wants no more than one."""
        for kind, text in parts:
            self._num_calls += kind == "call"
            if self._num_calls < 2 or kind not in ("call", "arguments"):
                yield kind, text


@dataclass(slots=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """All parts of an answer, put together."""

    content: str = ""
    thoughts: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Add parts that follow on what is there."""
        for kind, text in parts:
            if kind == "content":
                self.content += text
            elif kind == "thought":
                self.thoughts += text
            elif kind == "call":
                self.calls.append(Call(text))
            else:
                self.calls[-1].arguments += text


def parse(outline: Outline, text: str) -> tuple[Answer, AnswerParser]:
    """Take a whole answer apart; the parser that did so tells what of it were thoughts."""
    parser, answer = AnswerParser(outline), Answer()
    answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer, parser


def call_id(uid: str, number: int) -> str:
    """Name a call: the same from whatever replica its answer is read."""
    return "call_" + hashlib.blake2b(f"{uid}:{number}".encode(), digest_size=12).hexdigest()
