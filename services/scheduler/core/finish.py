"""The rules by which a choice ends: end tokens, stop token ids, a grammar that is complete, length.

An end token counts only behind min_tokens and unless ignore_eos; a stop token id only behind min_tokens. Stop wins
over length. Stop strings are the detokenizer's affair.
"""

from collections.abc import Iterable

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
        if self.ends_text(req, int(req.token_ids[-1]), req.known_len):
            return "stop"
        return "length" if req.known_len >= req.end_len else None

    def ends_text(self, req: Req, token_id: int, length: int) -> bool:
        """Whether a token ends its choice without being part of the text.

        Args:
            req: whose.
            token_id: its newest token.
            length: tokens of prompt and answer, the new one included.
        """
        if length <= req.prompt_len + max(0, req.params.min_tokens):
            return False
        return (bool(self._is_end[token_id]) and not req.params.ignore_eos) or token_id in req.params.stop_token_ids

    def complete_rows(
        self, table: SlotTable, slots: IntArray, ids: IntArray, lengths: IntArray, ended: Iterable[int]
    ) -> list[int]:
        """Which of the rows that `of_rows` found ended stop because of their grammar: their token is part of the text.

        Rows of such a table are few, so they are looked at one by one.
        """
        found = [row for row in ended if table.is_complete[slots[row]]]
        return [
            row for row in found if not self.ends_text(table.req(int(slots[row])), int(ids[row]), int(lengths[row]))
        ]

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
        stops |= table.is_complete[slots]
        ended = np.flatnonzero(stops | (lengths >= table.end_len[slots])).tolist()
        return {row: "stop" if stops[row] else "length" for row in ended}
