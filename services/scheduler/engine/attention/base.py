"""What an attention backend is: it plans a step from plain arrays, then runs it once per layer."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.scheduler.engine.context import PlannedAttention

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of one step, on the host.

    Attributes:
        starts: (rows,) tokens of the request that are in its pages already.
        lengths: (rows,) tokens of the request in this step.
        offsets: (rows + 1,) first token of each row in the step, and their number.
        page_table: (rows, columns) page of token t is page_table[row, t // page_size].
        token_rows: (num_tokens,) row of each token.
        positions: (num_tokens,) place of each token in its request.
        num_decode: rows [0, num_decode) are decode rows. A row's result depends on its kind, not on the other rows.
    """

    starts: IndexArray
    lengths: IndexArray
    offsets: IndexArray
    page_table: IndexArray
    token_rows: IndexArray
    positions: IndexArray
    num_decode: int = 0


class AttentionBackend(Protocol):
    """Computes attention over the paged pool. Every backend stores the step's keys and values itself."""

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Prepare a step. Steps are planned and run one after the other, on the thread of the device."""
        ...
