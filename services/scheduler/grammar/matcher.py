"""One answer on its way through its grammar."""

from collections.abc import Sequence

from llguidance import LLMatcher

from services.scheduler.core.batch import IntArray


class GrammarMatcher:
    """A Matcher. Owns its llguidance state; a grammar that becomes too hard to follow fails it for good.

    Args:
        state: at the place in the answer where this matcher begins; its own from here on.
        eos_ids: end tokens.
        ignore_eos: end tokens may not be drawn.
        llg_words: words of a mask as llguidance writes it.
    """

    def __init__(self, state: LLMatcher, eos_ids: Sequence[int], *, ignore_eos: bool, num_words: int) -> None:
        self._state = state
        self._eos_ids = eos_ids
        self._ignore_eos = ignore_eos
        self._num_words = num_words

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and no token but an end token can follow."""
        return self._state.is_stopped() and not self._state.is_error()

    def accept(self, token_id: int) -> bool:
        """Take in the next token; False if the grammar does not allow it, or has become too hard to follow."""
        return self._state.consume_token(token_id)

    def fill(self, mask: IntArray) -> bool:
        """Set a bit for each token that may follow; False if the grammar has become too hard to follow."""
        words = mask[: self._num_words]
        assert words.flags.c_contiguous, "a mask is written to by its address"
        self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._ignore_eos:
            for token_id in self._eos_ids:
                mask[token_id >> 5] &= ~(1 << (token_id & 31))
        return not self._state.is_error()
