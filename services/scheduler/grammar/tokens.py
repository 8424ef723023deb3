"""A vocabulary as llguidance wants it: the bytes of every id, and which ids are no text."""

from collections.abc import Sequence

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

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._encode(plain, add_special=False)


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
