"""What a vocabulary is: ids, their bytes, and the way from text to ids.

It is fixed once loaded and holds no state between calls, so any number of threads may share it. Where one
comes from is the business of shared/vocab.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class TextEncoder(Protocol):
    """Turns texts into ids without adding anything. Must be usable from several threads at once."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text; special tokens written in it become their ids."""
        ...


@dataclass(frozen=True)
class Vocabulary:
    """Ids, their bytes, and the way from text to ids.

    Attributes:
        encoder: the way from text to ids.
        tokens: id -> raw bytes; None where the id belongs to no token.
        special_ids: control tokens: never part of an answer's text.
        prefix_ids: what every prompt begins with (usually one BOS, often nothing).
        bos_id: begin of text, or None.
        eos_ids: tokens that end an answer.
        strips_leading_space: text decoded from the very start loses one leading blank (SentencePiece). A
            continuation never does: only tokens after nothing but special ones are at the start.
        empty_ids: what a prompt without any token stands for: the start of a document.
        max_token_bytes: bytes of text one token can stand for at most; None when no bound can be proven.
        dropped_bytes: bytes of text for which there is no token, so that they vanish.
    """

    encoder: TextEncoder
    tokens: Sequence[bytes | None]
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    strips_leading_space: bool = False
    empty_ids: tuple[int, ...] = ()
    max_token_bytes: int | None = None
    dropped_bytes: bytes = b""

    @property
    def num_ids(self) -> int:
        """One more than the largest id. Ids below it may be holes; a model may have rows beyond it."""
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Raw bytes of one token, which need not be valid UTF-8; None for an id without a token."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None

    def is_special(self, token_id: int) -> bool:
        """Whether a token is for control and not for reading."""
        return token_id in self.special_ids

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Encode one text; see `encode_batch`."""
        return self.encode_batch([text], add_special=add_special)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """Encode texts without holding the interpreter.

        Args:
            texts: of any length; the time taken grows a little faster than the longest.
            add_special: begin each with `prefix_ids`, unless the text spells them out already.
        """
        encoded = self.encoder.encode_batch(texts)
        prefix = list(self.prefix_ids)
        if not add_special or not prefix:
            return encoded
        return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in encoded]

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """Join the bytes of tokens, as a continuation: nothing is stripped. Ids without a token are empty."""
        return b"".join(self.token_bytes(i) or b"" for i in ids if not (skip_special and i in self.special_ids))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode a whole text from its start; broken UTF-8 becomes replacement characters."""
        text = self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def is_too_long(self, text: str, max_tokens: int) -> bool:
        """Whether a text certainly has more tokens than that; False says nothing. Takes no encoding."""
        if self.max_token_bytes is None or len(text) * 4 <= max_tokens * self.max_token_bytes:
            return False
        data = text.encode("utf-8", "surrogatepass").translate(None, self.dropped_bytes)
        return len(data) > max_tokens * self.max_token_bytes
