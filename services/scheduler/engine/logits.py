"""What happens to logits before a token is drawn, in a fixed order: bias, bans, penalties, the masks of grammars.

Owns what that needs to know of each slot. Slots without any of it cost nothing.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.scheduler.core.batch import IntArray, MaskArray, SlotSetup
from shared.sampling import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class LogitsProcessors:
    """Bias, bans and penalties of every slot."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._slots: dict[int, _SlotState] = {}

    def set_up(self, setup: SlotSetup) -> None:
        """Begin a request in a slot; its former user is forgotten."""
        self._slots.pop(setup.slot, None)
        params = setup.params
        state = _SlotState(params.min_tokens, params)
        if params.logit_bias:
            state.bias_ids = self._known(params.logit_bias)
            state.bias = np.array([params.logit_bias[int(i)] for i in state.bias_ids], dtype=np.float32)
        if params.min_tokens > 0:
            state.banned = self._known({*self._eos_token_ids, *params.stop_token_ids})
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            state.seen = _Seen(setup.prompt_ids, setup.output_ids)
        if len(state.bias_ids) or len(state.banned) or state.seen is not None:
            self._slots[setup.slot] = state

    def apply(self, logits: Tensor, slots: IntArray, out_index: IntArray) -> None:
        """Change logits in place.

        Args:
            logits: (num_drawn, vocab_size) float32.
            slots: (num_drawn,) slot of each row.
            out_index: (num_drawn,) 1-based index of the token to draw.
        """
        if not self._slots:
            return
        flat = logits.view(-1)
        for row, slot in enumerate(slots):
            state = self._slots.get(int(slot))
            if state is not None:
                state.apply(flat[row * self._vocab_size : (row + 1) * self._vocab_size], int(out_index[row]))

    def note(self, slots: IntArray, tokens: IntArray) -> None:
        """Count the tokens that were drawn."""
        if not self._slots:
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            state = self._slots.get(slot)
            if state is not None and state.seen is not None:
                state.seen.count(token)

    def _known(self, ids: "dict[int, float] | set[int]") -> Ids:
        """Ids that the model has, sorted."""
        return np.array(sorted(i for i in ids if 0 <= i < self._vocab_size), dtype=np.int64)


def apply_masks(logits: Tensor, rows: npt.NDArray[np.int64], masks: MaskArray) -> None:
    """Set what a grammar does not allow to minus infinity, in place.

    Args:
        logits: (num_drawn, vocab_size) float32.
        rows: (num_guided,) rows that a mask is for.
        masks: (num_guided, words) bits, the first token in the lowest bit of the first word.
    """
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), axis=1, bitorder="little")
    banned = torch.from_numpy(bits[:, : logits.shape[1]] == 0).to(logits.device)
    for row, mask in zip(rows.tolist(), banned, strict=True):
        logits[row].masked_fill_(mask, -torch.inf)


def _no_ids() -> Ids:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class _SlotState:
    """What one request asks for."""

    min_tokens: int
    params: SamplingParams
    bias_ids: Ids = field(default_factory=_no_ids)
    bias: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    banned: Ids = field(default_factory=_no_ids)
    seen: "_Seen | None" = None

    def apply(self, row: Tensor, out_index: int) -> None:
        """Change one row of logits in place."""
        if len(self.bias_ids):
            row.index_add_(
                0, torch.from_numpy(self.bias_ids).to(row.device), torch.from_numpy(self.bias).to(row.device)
            )
        if out_index <= self.min_tokens and len(self.banned):
            row.index_fill_(0, torch.from_numpy(self.banned).to(row.device), -torch.inf)
        if self.seen is not None:
            self._penalise(row, self.seen)

    def _penalise(self, row: Tensor, seen: "_Seen") -> None:
        ids = torch.from_numpy(seen.ids).to(row.device)
        counts = torch.from_numpy(seen.counts).to(row.device)
        values = row.index_select(0, ids)
        repetition = self.params.repetition_penalty
        if repetition != 1.0:
            values = torch.where(values > 0, values / repetition, values * repetition)
        values -= self.params.frequency_penalty * counts
        values -= self.params.presence_penalty * (counts > 0)
        row.index_copy_(0, ids, values)


class _Seen:
    """Tokens of prompt and output, each once, with how often it was drawn."""

    def __init__(self, prompt_ids: IntArray, output_ids: IntArray) -> None:
        drawn, times = np.unique(output_ids, return_counts=True)
        only_prompt = np.setdiff1d(prompt_ids, drawn)
        self._num = len(drawn) + len(only_prompt)
        self._ids = np.zeros(max(64, 2 * self._num), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: self._num] = np.concatenate((drawn, only_prompt))
        self._counts[: len(drawn)] = times
        self._places = {token: place for place, token in enumerate(self._ids[: self._num].tolist())}

    @property
    def ids(self) -> Ids:
        """(num_seen,) distinct ids."""
        return self._ids[: self._num]

    @property
    def counts(self) -> Floats:
        """(num_seen,) times each was drawn; 0 for those that only the prompt has."""
        return self._counts[: self._num]

    def count(self, token: int) -> None:
        """Note one more drawn token."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._num
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._num += 1
        self._counts[place] += 1
