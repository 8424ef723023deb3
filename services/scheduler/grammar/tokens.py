"""A vocabulary as llguidance wants it: the bytes of every id, and which ids are no text."""

import itertools
import re
from collections.abc import Sequence
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from shared.vocab import Vocabulary


class _Tokens:
    """The attributes that `TokenizerWrapper` reads."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_id: int) -> None:
        known = [vocabulary.token_bytes(i) for i in range(vocab_size)]
        # A name in place of bytes keeps ids without a token apart; as special ones they match no text.
        self.tokens: list[bytes] = [b"<%d>" % i if text is None else text for i, text in enumerate(known)]
        holes = {i for i, text in enumerate(known) if not text}
        self.special_token_ids = sorted(holes | {i for i in vocabulary.special_ids if i < vocab_size} | {eos_id})
        self.eos_token_id = eos_id
        self.bos_token_id = vocabulary.bos_id
        self._encode = vocabulary.encode
        self._special = frozenset(self.special_token_ids)
        names = sorted({(known[i] or b"").decode("utf-8", "ignore") for i in self._special} - {""})
        # The first character of each spelling of a control token, also of one that begins within another.
        self._begun = re.compile("(?=" + "|".join(map(re.escape, names)) + ").", re.DOTALL) if names else None

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode a text that an answer must have: as text, also where it spells a control token."""
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        found = self._encode(plain, add_special=False)
        if self._begun is None or self._special.isdisjoint(found):
            return found
        ends = [0, *(match.end() for match in self._begun.finditer(plain)), len(plain)]
        found = [i for a, b in itertools.pairwise(ends) for i in self._encode(plain[a:b], add_special=False)]
        wanted = plain.encode("utf-8", "surrogatepass")
        # Some vocabularies put a blank in front of every piece, and others have a control token of one character.
        plain_ids = self._special.isdisjoint(found) and b"".join(self.tokens[i] for i in found) == wanted
        return found if plain_ids else self._by_longest(wanted)

    def _by_longest(self, text: bytes) -> list[int]:
        """Take the longest token of text each time; what no token begins with is left to the grammar to refuse."""
        ids, place = [], 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            found = next((text[place : place + n] for n in sizes if text[place : place + n] in self._plain), None)
            if found is None:
                break
            ids.append(self._plain[found])
            place += len(found)
        return ids

    @cached_property
    def _plain(self) -> dict[bytes, int]:
        return {text: i for i, text in reversed(list(enumerate(self.tokens))) if i not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._plain), default=0)


def make_tokenizer(vocabulary: Vocabulary, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Make llguidance's view of a vocabulary.

    Args:
        vocabulary: of the model.
        vocab_size: of the engine; ids of the vocabulary beyond it are left out, those that it lacks match nothing.
        eos_ids: end tokens, all allowed where an answer may end; not empty.
    """
    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary, vocab_size, eos_ids[0])), n_vocab=vocab_size, eos_token=list(eos_ids)
    )
