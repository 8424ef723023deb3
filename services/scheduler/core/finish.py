"""The rules by which a choice ends: end tokens, stop token ids, length.

An end token counts only behind min_tokens and unless ignore_eos; a stop token id only behind min_tokens. Stop wins
over length. Stop strings are the detokenizer's affair.
"""

import numpy as np

from services.scheduler.core.batch import BoolArray, IntArray
from services.scheduler.core.ports import EngineLimits
from services.scheduler.core.req import Req
from services.scheduler.core.slots import SlotTable
from shared.messages import FinishReason


class FinishRules:
    """The rules for one model."""

    def __init__(self, limits: EngineLimits) -> None:
        self._is_end: BoolArray = np.zeros(limits.vocab_size, np.bool_)
        self._is_end[[i for i in limits.eos_token_ids if i < limits.vocab_size]] = True

    def of(self, req: Req) -> FinishReason | None:
        """How a choice has ended with the tokens it arrived with, judged by the last; None if it goes on."""
        last = int(req.token_ids[-1])
        if req.known_len > req.prompt_len + max(0, req.params.min_tokens):
            ends = bool(self._is_end[last]) and not req.params.ignore_eos
            if ends or last in req.params.stop_token_ids:
                return "stop"
        return "length" if req.known_len >= req.end_len else None

    def of_rows(self, table: SlotTable, slots: IntArray, ids: IntArray, lengths: IntArray) -> dict[int, FinishReason]:
        """How choices end with their newest tokens.

        Args:
            table: what is known of the slots.
            slots: (rows,) whose tokens.
            ids: (rows,) the tokens.
            lengths: (rows,) tokens of prompt and answer, the new one included.

        Returns:
            Row -> how it ended, for those that did.
        """
        stops = self._is_end[ids] & ~table.ignores_eos[slots]
        for row in np.flatnonzero(table.has_stop_ids[slots]).tolist():
            stops[row] |= int(ids[row]) in table.req(int(slots[row])).params.stop_token_ids
        stops &= lengths > table.min_len[slots]
        ended = np.flatnonzero(stops | (lengths >= table.end_len[slots])).tolist()
        return {row: "stop" if stops[row] else "length" for row in ended}
