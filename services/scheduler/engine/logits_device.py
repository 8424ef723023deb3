"""Bias, bans and penalties on a device, without asking it for anything: what `logits` does, for steps in flight.

The tokens of a request that penalties look at are counted on the device, because the host learns them a step
later. Rows without any of it cost nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.scheduler.core.batch import IntArray, SlotSetup


@dataclass(frozen=True, slots=True)
class _SlotState:
    """What one request asks for; tensors on the device."""

    bias_ids: Tensor | None
    bias: Tensor | None
    banned: Tensor | None
    min_tokens: int
    penalties: tuple[float, float, float] | None


class DeviceProcessors:
    """Bias, bans and penalties of every slot."""

    def __init__(self, max_running: int, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._shape = (max_running, vocab_size)
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._slots: dict[int, _SlotState] = {}
        self._has = np.zeros(max_running, dtype=np.bool_)
        self._penalised = np.zeros(max_running, dtype=np.bool_)
        # Reserved when the first request asks for a penalty.
        self._counts: Tensor | None = None
        self._in_prompt: Tensor | None = None

    def set_up(self, setup: SlotSetup) -> None:
        """Begin a request in a slot; its former user is forgotten."""
        params, slot = setup.params, setup.slot
        self._has[slot] = self._penalised[slot] = False
        bias_ids = self._known(params.logit_bias)
        banned = self._known({*self._eos_token_ids, *params.stop_token_ids}) if params.min_tokens > 0 else []
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        penalised = penalties != (1.0, 0.0, 0.0)
        if not bias_ids and not banned and not penalised:
            self._slots.pop(slot, None)
            return
        self._has[slot], self._penalised[slot] = True, penalised
        values = torch.tensor([params.logit_bias[i] for i in bias_ids], dtype=torch.float32)
        self._slots[slot] = _SlotState(
            bias_ids=self._ids(bias_ids) if bias_ids else None,
            bias=values.to(self._device) if bias_ids else None,
            banned=self._ids(banned) if banned else None,
            min_tokens=params.min_tokens,
            penalties=penalties if penalised else None,
        )
        if penalised:
            self._begin_counts(setup)

    def concern(self, slots: IntArray) -> bool:
        """Whether any of some rows' slots asks for something."""
        return bool(self._has[slots].any())

    def apply(self, logits: Tensor, slots: IntArray, out_index: IntArray) -> None:
        """Change logits in place.

        Args:
            logits: (num_drawn, vocab_size) float32.
            slots: (num_drawn,) slot of each row.
            out_index: (num_drawn,) 1-based index of the token to draw.
        """
        for row in np.flatnonzero(self._has[slots]).tolist():
            state = self._slots[int(slots[row])]
            if state.bias_ids is not None and state.bias is not None:
                logits[row].index_add_(0, state.bias_ids, state.bias)
            if state.banned is not None and out_index[row] <= state.min_tokens:
                logits[row].index_fill_(0, state.banned, -torch.inf)
        rows = np.flatnonzero(self._penalised[slots])
        if len(rows):
            self._penalise(logits, rows, slots[rows])

    def note(self, slots: IntArray, tokens: Tensor) -> None:
        """Count the tokens that were drawn; (num_drawn,) on the device, negative where none could be."""
        rows = np.flatnonzero(self._penalised[slots])
        if len(rows) and self._counts is not None:
            drawn = tokens[self._ids(rows)].long().clamp_(min=0)
            ones = torch.ones(len(rows), dtype=torch.int16, device=self._device)
            self._counts.index_put_((self._ids(slots[rows]), drawn), ones, accumulate=True)

    def _penalise(self, logits: Tensor, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]", slots: IntArray) -> None:
        assert self._counts is not None and self._in_prompt is not None
        places, lines = self._ids(rows), self._ids(slots)
        wanted = [self._slots[int(slot)].penalties or (1.0, 0.0, 0.0) for slot in slots]
        repetition, frequency, presence = torch.tensor(wanted, dtype=torch.float32).to(self._device).t()[:, :, None]
        counts = self._counts[lines].float()
        drawn = counts > 0
        values = logits[places]
        punished = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(drawn | self._in_prompt[lines], punished, values)
        logits[places] = values - frequency * counts - presence * drawn

    def _begin_counts(self, setup: SlotSetup) -> None:
        if self._counts is None or self._in_prompt is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int16, device=self._device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._counts[setup.slot].zero_()
        self._in_prompt[setup.slot].zero_().index_fill_(0, self._ids(setup.prompt_ids), True)
        if len(setup.output_ids):
            ids, times = np.unique(setup.output_ids, return_counts=True)
            self._counts[setup.slot].index_copy_(
                0, self._ids(ids), torch.from_numpy(times.astype(np.int16)).to(self._device)
            )

    def _known(self, ids: "dict[int, float] | set[int]") -> list[int]:
        """Ids that the model has, sorted."""
        return sorted(i for i in ids if 0 <= i < self._shape[1])

    def _ids(self, ids: "list[int] | np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
        return torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(self._device)
