"""Loads the one vocabulary that all services use. Where it comes from is settled here; nobody else asks."""

import re
from collections.abc import Sequence

from shared.model_files import BYTE_SPECIALS, ModelFiles
from shared.vocabulary import TextEncoder, Vocabulary

__all__ = ["TextEncoder", "Vocabulary", "byte_vocabulary", "load_vocabulary"]


def load_vocabulary(files: ModelFiles) -> Vocabulary:
    """Load the vocabulary of a model.

    Raises:
        ConfigError: it is missing, broken, or of a kind that is not supported; names it.
    """
    if files.kind == "bytes":
        return byte_vocabulary(files.eos_token_ids)
    # Here, because only models with files need the tokenizers library.
    from shared.hub_vocab import load_hub_vocabulary

    return load_hub_vocabulary(files)


def byte_vocabulary(eos_ids: tuple[int, ...] = ()) -> Vocabulary:
    """Make the vocabulary of the fake engine: the 256 bytes, then BYTE_SPECIALS. It needs no file and no library."""
    specials = [text.encode() for text in BYTE_SPECIALS]
    special_ids = range(256, 256 + len(specials))
    return Vocabulary(
        encoder=_ByteEncoder(),
        tokens=[bytes([i]) for i in range(256)] + specials,
        special_ids=frozenset(special_ids),
        eos_ids=eos_ids or (special_ids[-1],),
        empty_ids=(special_ids[0],),
        max_token_bytes=max(map(len, specials)),
    )


class _ByteEncoder:
    """One id per byte of UTF-8; special tokens written out become one id."""

    _pattern = re.compile("(" + "|".join(map(re.escape, BYTE_SPECIALS)) + ")")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(self._pattern.split(text)):
            if i % 2:
                ids.append(256 + BYTE_SPECIALS.index(piece))
            else:
                ids.extend(piece.encode())
        return ids
