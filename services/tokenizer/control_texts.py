"""Keeps what clients write in messages from becoming control tokens.

A tokenizer takes a control token that is spelled in a text for the token itself, so the text of a message could end
its turn and begin another's. Here such a spelling gets a cut into it before the template prints it, and the prompt is
encoded piece by piece between its cuts: no piece spells a control token but those the template writes. All other
text is encoded whole, to the same ids as ever. (A SentencePiece vocabulary puts a blank in front of each piece, so
there the spelling has a blank in it.) Knows neither templates nor ids.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Final

from services.tokenizer.chat_messages import Message
from shared.dialect import THOUGHT_MARKS, TOOL_MARKS
from shared.vocab import Vocabulary

_OWN_MARKS: Final = frozenset(mark for marks in (*TOOL_MARKS.values(), *THOUGHT_MARKS.values()) for mark in marks)
"""What an assistant writes with control tokens on purpose: its earlier answers come back as text."""
_SHORTEST: Final = 2


class ControlTexts:
    """The control tokens of a vocabulary, as they are spelled. It never changes, so threads may share it.

    Args:
        vocabulary: of the model.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        spelled = {(vocabulary.token_bytes(i) or b"").decode("utf-8", "ignore") for i in vocabulary.special_ids}
        texts = sorted(text for text in spelled if len(text) >= _SHORTEST)
        # Private-use characters around a number nobody can guess: no client can write a cut.
        self._cut = f"\uf8fd{secrets.randbelow(10**16):016d}\uf8fd"
        self._all = _Spellings(texts, self._cut)
        self._foreign = _Spellings([text for text in texts if text not in _OWN_MARKS], self._cut)

    def cut_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Cut every spelling in messages; an assistant's marks of calls and thoughts stay tokens."""
        return [(self._foreign if m.get("role") == "assistant" else self._all).cut(m) for m in messages]

    def cut(self, value: Any) -> Any:
        """Cut every spelling in a tree of texts, lists and objects, names included.

        Raises:
            RecursionError: it is nested too deeply.
        """
        return self._all.cut(value)

    def pieces(self, text: str) -> list[str]:
        """Take a rendered text apart at its cuts; joined, the pieces are what the client wrote."""
        return text.split(self._cut)


class _Spellings:
    """Finds some texts in others."""

    def __init__(self, texts: Iterable[str], cut: str) -> None:
        found = "|".join(map(re.escape, texts)) or r"(?!)"
        self._found = re.compile(found)
        self._begun = re.compile(f"(?={found})(.)", re.DOTALL)  # also one that begins within another
        self._with_cut = rf"\g<1>{cut}"

    def cut(self, value: Any) -> Any:
        if isinstance(value, str):
            # Two steps, since looking for whole texts is fast, and there are none nearly always.
            return self._begun.sub(self._with_cut, value) if self._found.search(value) else value
        if isinstance(value, dict):
            return {self.cut(name): self.cut(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.cut(item) for item in value]
        return value
