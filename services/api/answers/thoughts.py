"""Takes the thoughts out of an answer: what stands between the marks in front of it.

Blanks around the marks belong to them. A mark that is not where one is expected is text like any other.
"""

from collections.abc import Callable

from services.api.answers.text import BLANK, Part, held, may_become
from shared.dialect import Thoughts


class ThoughtReader:
    """The thoughts of one answer, as its text grows. Gives back the text behind them.

    Attributes:
        begun: there are thoughts.
        closed: they have ended, or there are none.
        over: text behind them has begun; it need not be fed any more.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._open = thoughts.open
        self._close = thoughts.close
        self._rest = ""
        self._state: Callable[[bool], str] = self._opening
        self._said = False
        self._parts: list[Part] = []
        self.begun = thoughts.begun
        self.closed = False
        self.over = False

    def feed(self, text: str, parts: list[Part], *, final: bool = False) -> str:
        """Take text; put thoughts into `parts`, and give what follows them."""
        if self.over:
            return text
        self._rest += text
        self._parts = parts
        before = None
        while before is not self._state:
            before = self._state
            behind = before(final)
        return behind

    def _opening(self, final: bool) -> str:
        text = self._rest.lstrip(BLANK)
        if text.startswith(self._open):
            self.begun = True
            self._rest = text[len(self._open) :]
            self._state = self._thinking
        elif text.startswith(self._close):
            self.begun = self.closed = True
            self._rest = text
            self._state = self._gap
        elif (may_become(text, self._open) or may_become(text, self._close)) and not final:
            return ""
        elif self.begun:
            self._state = self._thinking
        else:
            return self._through()
        return ""

    def _thinking(self, final: bool) -> str:
        if not self._said:
            self._rest = self._rest.lstrip(BLANK)
        at = self._rest.find(self._close)
        if at >= 0:
            self._say(self._rest[:at].rstrip(BLANK))
            self._rest = self._rest[at + len(self._close) :]
            self._state = self._gap
            self.closed = True
            return ""
        size = 0 if final else held(self._rest, (self._close,))
        text = self._rest[: len(self._rest) - size]
        if not final:
            text = text.rstrip(BLANK)
        self._say(text)
        self._rest = self._rest[len(text) :]
        return ""

    def _gap(self, final: bool) -> str:
        """Pass over what is between thoughts and text: blanks, and the closing mark said again."""
        self._rest = self._rest.lstrip(BLANK)
        while self._rest.startswith(self._close):
            self._rest = self._rest[len(self._close) :].lstrip(BLANK)
        return "" if may_become(self._rest, self._close) and not final else self._through()

    def _through(self) -> str:
        text, self._rest = self._rest, ""
        self.closed = self.over = True
        return text

    def _say(self, text: str) -> None:
        if text:
            self._said = True
            self._parts.append(("thought", text))
