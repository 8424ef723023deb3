"""Ids to text as it grows: what k tokens print is a function of those k tokens alone, however they arrive.

Owns the tables of what each id prints and the bytes of a character that is not whole yet. Knows nothing of
stop strings, logs or the broker. The bytes of a token need not be whole characters (byte-level BPE, and the
byte tokens of SentencePiece), so text lags behind until the next token settles what they are.
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence

from shared.vocab import Vocabulary


class TokenTexts:
    """What each id prints, looked up once for a whole vocabulary. Immutable; shared by all replies.

    Args:
        vocabulary: of the model.
        skip_special: control tokens print nothing.
        marks: texts of control tokens that print all the same: they say what follows.

    Attributes:
        pieces: id -> bytes; empty for what prints nothing.
        texts: id -> text, or None where the bytes are not whole characters by themselves.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool, marks: Iterable[str] = ()) -> None:
        printing = {mark.encode() for mark in marks}
        self.pieces: list[bytes] = [vocabulary.token_bytes(i) or b"" for i in range(vocabulary.num_ids)]
        for i in vocabulary.special_ids if skip_special else ():
            if i < len(self.pieces) and self.pieces[i] not in printing:
                self.pieces[i] = b""
        self.texts: list[str | None] = [_whole(piece) for piece in self.pieces]


class Incremental:
    """The text of one reply, token by token.

    Args:
        tokens: what the ids print.
        strip_start: drop one leading blank, for a reply that has nothing in front of it.
    """

    __slots__ = ("_pending", "_strip", "_tokens")

    def __init__(self, tokens: TokenTexts, *, strip_start: bool = False) -> None:
        self._tokens = tokens
        self._pending = b""
        self._strip = strip_start

    def push(self, token_id: int) -> str:
        """Take one token; give the characters that it completes. Ids without a token print nothing."""
        texts = self._tokens.texts
        text = texts[token_id] if 0 <= token_id < len(texts) else ""
        if text == "":
            return ""
        if text is None or self._pending:
            text = self._decode(self._pending + self._tokens.pieces[token_id])
        return self._begin(text) if self._strip else text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Take several tokens; give the characters that they complete."""
        if len(token_ids) == 1:
            return self.push(token_ids[0])
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Give what is left at the end: a character that stayed broken becomes replacement characters."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text

    def _decode(self, data: bytes) -> str:
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def _begin(self, text: str) -> str:
        if text:
            self._strip = False
        return text.removeprefix(" ")


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
