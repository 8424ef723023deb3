"""Takes calls of tools out of the text of an answer: what the formats have in common.

A call is handed on as it grows, once its name is known to be one that was offered and its arguments have begun.
Until then its text is kept: what turns out to be no call becomes text again, to the last character. Arguments that
break off are handed on as far as they go. Where deltas are cut plays no part.
"""

import re
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from services.api.answers.json_scan import JsonScanner
from services.api.answers.text import BLANK, Part, find_first, held

_HEAD: Final = re.compile(
    r'[ \t\r\n]*\{[ \t\r\n]*(?:"type"[ \t\r\n]*:[ \t\r\n]*"function"[ \t\r\n]*,[ \t\r\n]*)?'
    r'"name"[ \t\r\n]*:[ \t\r\n]*"([A-Za-z0-9_-]{1,64})"[ \t\r\n]*,[ \t\r\n]*'
    r'"(?:arguments|parameters)"[ \t\r\n]*:[ \t\r\n]*(?=\{)'
)

_NO_OBJECT: Final = re.compile(r"[ \t\r\n]*[^{ \t\r\n]")


class _Object(msgspec.Struct):
    """A call whose keys come in another order, or whose arguments are no object."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"{}")


class CallReader:
    """The calls of one answer. A format adds the states around the object of a call.

    A state looks at the text that is left, takes from it what it can, and moves to another state, or waits for more.

    Args:
        functions: names that may be called.
    """

    marks: tuple[str, ...] = ()
    """What a call begins with."""

    def __init__(self, functions: Collection[str]) -> None:
        self._functions = functions
        self._rest = ""
        self._blank = ""
        self._raw = ""
        self._scanner = JsonScanner()
        self._scanned = 0
        self._whole: list[str] = []
        self._parts: list[Part] = []
        self._state: Callable[[bool], bool] = self._content
        self.num_calls = 0

    def feed(self, text: str, parts: list[Part], *, final: bool = False) -> None:
        """Take text and put into `parts` what it certainly is; with `final` all that is left."""
        self._rest += text
        self._parts = parts
        while self._state(final):
            pass
        if final and not self.num_calls:
            self._say(self._blank)

    # --- text around calls -------------------------------------------------------------------------------

    def _content(self, final: bool) -> bool:
        """Say text up to the mark of a call. Blanks wait: in front of a call they belong to it."""
        at, mark = find_first(self._rest, self.marks)
        if at >= 0:
            self._text(self._rest[:at])
            self._rest = self._rest[at + len(mark) :]
            self._begin(mark)
            return True
        size = 0 if final else held(self._rest, self.marks)
        cut = len(self._rest) - size
        self._text(self._rest[:cut])
        self._rest = self._rest[cut:]
        return False

    def _text(self, text: str) -> None:
        text = self._blank + text
        said = text.rstrip(BLANK)
        self._blank = text[len(said) :]
        self._say(said)

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(("content", text))

    def _begin(self, mark: str) -> None:
        """Go on behind the mark of a call."""
        self._raw = mark
        self._expect_object()

    def _no_call(self) -> bool:
        """Make text again of what looked like a call, and go on behind its mark."""
        raw, self._raw = self._raw, ""
        self._state = self._content
        self._text(raw)
        return True

    # --- the object of a call ----------------------------------------------------------------------------

    def _expect_object(self) -> None:
        self._scanner, self._scanned, self._whole = JsonScanner(), 0, []
        self._state = self._object

    def _object(self, final: bool) -> bool:
        head = _HEAD.match(self._rest)
        if head is not None:
            if head[1] not in self._functions:
                return self._no_call()
            self._call(head[1])
            self._rest = self._rest[head.end() :]
            self._scanner = JsonScanner()
            self._state = self._arguments
            return True
        if _NO_OBJECT.match(self._rest):
            return self._no_call()
        piece, self._scanned = self._scanner.take(self._rest, self._scanned)
        self._whole.append(piece)
        if self._scanner.done:
            return self._odd_object("".join(self._whole))
        if self._scanner.broken or final:
            return self._no_call()
        return False

    def _odd_object(self, text: str) -> bool:
        """Take a call whose object is there as a whole."""
        read = _read(text)
        if read is None or read[0] not in self._functions:
            return self._no_call()
        self._call(read[0])
        self._parts.append(("arguments", read[1]))
        self._rest = self._rest[self._scanned :]
        self._end_object()
        return True

    def _call(self, name: str) -> None:
        self._raw = self._blank = ""
        self.num_calls += 1
        self._parts.append(("call", name))

    def _arguments(self, final: bool) -> bool:
        piece, used = self._scanner.take(self._rest)
        if piece:
            self._parts.append(("arguments", piece))
        self._rest = self._rest[used:]
        if self._scanner.broken:
            self._state = self._broken_arguments
        elif self._scanner.done:
            self._end_arguments()
        else:
            return False
        return True

    def _end_arguments(self) -> None:
        """Go on behind the arguments of a call that was handed on as it grew."""
        self._scanner = JsonScanner(opened="{")
        self._state = self._frame

    def _frame(self, final: bool) -> bool:
        """Pass over the rest of a call's object: its bracket, and keys that say nothing."""
        _, used = self._scanner.take(self._rest)
        self._rest = self._rest[used:]
        if not (self._scanner.done or self._scanner.broken):
            return False
        self._end_object()
        return True

    def _broken_arguments(self, final: bool) -> bool:
        """Hand on what follows broken arguments as it is, up to the end of the call."""
        enders = self._enders()
        at, mark = find_first(self._rest, enders)
        if at >= 0:
            self._hand_on(at)
            self._rest = self._rest[len(mark) :] if mark not in self.marks else self._rest
            self._state = self._content
            return True
        self._hand_on(len(self._rest) - (0 if final else held(self._rest, enders)))
        return False

    def _hand_on(self, size: int) -> None:
        if size:
            self._parts.append(("arguments", self._rest[:size]))
            self._rest = self._rest[size:]

    def _enders(self) -> tuple[str, ...]:
        """Give the marks that end a call: its own, or another's beginning."""
        return self.marks

    def _end_object(self) -> None:
        """Go on behind the object of a call."""
        self._state = self._content


def _read(text: str) -> tuple[str, str] | None:
    """Give the name and the arguments of a call's object, or None if it is none."""
    try:
        call = msgspec.json.decode(text, type=_Object)
        raw = (bytes(call.arguments) or bytes(call.parameters)).decode()
        if raw.startswith('"'):
            raw = msgspec.json.decode(raw, type=str).strip() or "{}"
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if value is None:
        return call.name, "{}"
    return (call.name, raw) if isinstance(value, dict) else None
