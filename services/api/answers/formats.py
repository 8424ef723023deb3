"""The formats of calls: Hermes (also Qwen's), Llama 3's JSON, Mistral's."""

import re
from collections.abc import Collection
from typing import Final

from services.api.answers.calls import CallReader
from services.api.answers.json_scan import JsonScanner
from services.api.answers.text import BLANK, may_become
from shared.dialect import TOOL_MARKS, ToolFormat

_SEPARATOR: Final = re.compile(r"[ \t\r\n]*[;,]?[ \t\r\n]*")
_NAMED: Final = re.compile(
    r"[ \t\r\n]{0,8}([A-Za-z0-9_-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{0,64})?(?:\[ARGS\])?[ \t\r\n]{0,8}(?=\{)"
)
_MAX_NAMED: Final = 256
"""Longer than anything that `_NAMED` matches: a text of this length that does not match never will."""


class HermesReader(CallReader):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once per call, anywhere in the text."""

    marks = TOOL_MARKS["hermes"][:1]
    _close = TOOL_MARKS["hermes"][1]

    def _end_object(self) -> None:
        self._state = self._closing

    def _closing(self, final: bool) -> bool:
        """Pass over the closing mark, if it is there, also where the answer was cut within it."""
        text = self._rest.lstrip(BLANK)
        if may_become(text, self._close):
            if not final:
                return False
            self._rest = ""
        elif text.startswith(self._close):
            self._rest = text[len(self._close) :]
        self._state = self._content
        return True

    def _enders(self) -> tuple[str, ...]:
        return (self._close, *self.marks)


class Llama3Reader(CallReader):
    """`{"name": ..., "parameters": {...}}` in place of an answer, or behind `<|python_tag|>`; `;` between calls."""

    marks = TOOL_MARKS["llama3"]

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._state = self._between

    def _between(self, final: bool) -> bool:
        """Look for a call where one may begin without a mark: first of all, and behind another."""
        gap = _SEPARATOR.match(self._rest) if self.num_calls else None
        text = self._rest[gap.end() :] if gap else self._rest.lstrip(BLANK)
        if not final and (not text or may_become(text, self.marks[0])):
            return False
        if text.startswith("{"):
            self._raw = self._rest[: len(self._rest) - len(text)]
            self._rest = text
            self._expect_object()
        elif text.startswith(self.marks[0]):
            self._raw = self._rest[: len(self._rest) - len(text)] + self.marks[0]
            self._rest = text[len(self.marks[0]) :]
            self._expect_object()
        else:
            self._state = self._content
        return True

    def _end_object(self) -> None:
        self._state = self._between


class MistralReader(CallReader):
    """`[TOOL_CALLS]` and a list of objects, or (newer) a name and its arguments, each behind a mark of its own."""

    marks = TOOL_MARKS["mistral"][:1]

    def __init__(self, functions: Collection[str]) -> None:
        super().__init__(functions)
        self._in_list = False

    def _begin(self, mark: str) -> None:
        self._raw = mark
        self._state = self._marked

    def _marked(self, final: bool) -> bool:
        """Tell the two forms apart."""
        text = self._rest.lstrip(BLANK)
        if not text and not final:
            return False
        if text.startswith("["):
            self._raw += self._rest[: len(self._rest) - len(text) + 1]
            self._rest = text[1:]
            self._in_list = True
            self._expect_object()
        else:
            self._state = self._named
        return True

    def _named(self, final: bool) -> bool:
        head = _NAMED.match(self._rest)
        if head is None:
            return (final or len(self._rest) >= _MAX_NAMED) and self._no_call()
        if head[1] not in self._functions:
            return self._no_call()
        self._call(head[1])
        self._rest = self._rest[head.end() :]
        self._scanner = JsonScanner()
        self._in_list = False
        self._state = self._arguments
        return True

    def _no_call(self) -> bool:
        self._in_list = False
        return super()._no_call()

    def _end_arguments(self) -> None:
        if self._in_list:
            super()._end_arguments()
        else:
            self._state = self._content

    def _end_object(self) -> None:
        self._state = self._next

    def _next(self, final: bool) -> bool:
        """Go on in the list, or behind it."""
        text = self._rest.lstrip(BLANK)
        if not text and not final:
            return False
        if text.startswith(","):
            self._raw = self._rest[: len(self._rest) - len(text) + 1]
            self._rest = text[1:]
            self._expect_object()
            return True
        if text.startswith("]"):
            self._rest = text[1:]
        self._in_list = False
        self._state = self._content
        return True


READERS: Final[dict[ToolFormat, type[CallReader]]] = {
    "hermes": HermesReader,
    "llama3": Llama3Reader,
    "mistral": MistralReader,
}
