"""Follows JSON as it grows, as far as its structure goes: where a value ends, and where it stops being one.

Strings and brackets are told apart and nothing more is checked, so that what is streamed can be handed on at
once. Control characters inside strings, which models write and JSON forbids, are escaped on the way.
"""

import re
from typing import Final

MAX_DEPTH: Final = 128
_STRING_RUN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_PLAIN_RUN: Final = re.compile(r"[ \t\r\n,:0-9+\-.eEtrufalsn]*")
_CLOSERS: Final = {"{": "}", "[": "]"}


class JsonScanner:
    """One object or array on its way. Feed it from its opening bracket on.

    Attributes:
        done: its closing bracket was seen.
        broken: something that cannot follow was seen, or it is nested too deeply.
    """

    __slots__ = ("_escaped", "_in_string", "_open", "broken", "done")

    def __init__(self, opened: str = "") -> None:
        """Begin; `opened` are brackets that were seen already."""
        self._open = [_CLOSERS[bracket] for bracket in opened]
        self._in_string = False
        self._escaped = False
        self.done = False
        self.broken = False

    def take(self, text: str, at: int = 0) -> tuple[str, int]:
        """Take text from `at` on, to the end of the value at most.

        Returns:
            What was taken, with its strings made valid, and where it ends in `text`. It ends before the end of
            `text` only when the value is done or broken.
        """
        said: list[str] = []
        begin = i = at
        while i < len(text) and not (self.done or self.broken):
            if self._in_string:
                i, escape = self._string(text, i)
                if escape:
                    said += (text[begin : i - 1], escape)
                    begin = i
            else:
                i = self._structure(text, i)
        said.append(text[begin:i])
        return "".join(said), i

    def _string(self, text: str, i: int) -> tuple[int, str]:
        """Go on inside a string; stop behind a character that must be escaped, and give its escape."""
        while i < len(text):
            if self._escaped:
                self._escaped = False
            else:
                run = _STRING_RUN.match(text, i)
                i = run.end() if run else i
                if i == len(text):
                    break
                if text[i] == '"':
                    self._in_string = False
                    return i + 1, ""
                self._escaped = text[i] == "\\"
            if text[i] < " ":
                return i + 1, f"\\u{ord(text[i]):04x}"
            i += 1
        return i, ""

    def _structure(self, text: str, i: int) -> int:
        """Go on between strings; stop behind a bracket or a quote, or at what does not belong here."""
        run = _PLAIN_RUN.match(text, i)
        i = run.end() if run else i
        if i == len(text):
            return i
        char = text[i]
        if char == '"' and self._open:
            self._in_string = True
        elif char in _CLOSERS and len(self._open) < MAX_DEPTH:
            self._open.append(_CLOSERS[char])
        elif self._open and char == self._open[-1]:
            self._open.pop()
            self.done = not self._open
        else:
            self.broken = True
            return i
        return i + 1
