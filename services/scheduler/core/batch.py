"""Batch and StepResult: what one engine step is given and gives back, as plain arrays.

This is the only language in which scheduling and the engine speak. A row is one request in one step: a
decode row computes one token, a prefill row a chunk of its prompt. Decode rows come first.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from shared.sampling import SamplingParams

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.int32]
"""(rows, mask_words(vocab_size)): bit i of word w says whether token 32 * w + i may be drawn."""

StepPath = Literal["eager", "decode_graph", "mixed_graph"]
"""How a step ran: layer by layer, or replayed from a CUDA graph of single tokens or of any."""

NO_ROWS: IntArray = np.empty(0, np.int32)

FROM_DEVICE = -1
"""An input id that the host does not know yet: the token the engine drew last for that slot."""


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """Tells the engine of a request that starts in a slot (or starts again, after a retraction or a takeover).

    Attributes:
        slot: the slot; whatever the engine knew of its former user is void.
        params: how its tokens are drawn.
        prompt_ids: (num_prompt_tokens,), for the penalties that look at the prompt.
        output_ids: (num_said,), tokens drawn before, for the penalties; not counted again.
    """

    slot: int
    params: SamplingParams
    prompt_ids: IntArray
    output_ids: IntArray


def mask_words(vocab_size: int) -> int:
    """Words of a row of a MaskArray."""
    return (vocab_size + 31) // 32


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A row of a prompt whose tokens are to be scored.

    Attributes:
        row: its place in the batch.
        targets: (num_scored,) the tokens behind the row's first positions, whose log probabilities are wanted; one
            fewer than the row's tokens where the prompt ends with it.
        num_top: alternatives wanted per position.
    """

    row: int
    targets: IntArray
    num_top: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, planned.

    Attributes:
        step: counts up by one.
        num_decode: rows [0, num_decode) are decode rows.
        slots: (rows,) request slot of each row.
        starts: (rows,) tokens of that request whose KV is in its pages already.
        lengths: (rows,) tokens computed now; positions are starts .. starts + lengths - 1.
        input_ids: (sum of lengths,) or FROM_DEVICE.
        page_table: (rows, columns) page of token t is page_table[row, t // page_size]; unused places are 0.
        sample: (rows,) whether a token is drawn after the row's last position (not within a prompt).
        out_index: (rows,) 1-based index of the token to draw; with the request's seed it fixes the chance.
        setups: slots that begin with this step.
        scores: rows whose prompt is scored.
        guided: (num_guided,) rows that draw only what a mask allows. The engine waits with their draw for
            `Engine.guide`, so the masks can be made while it computes.
    """

    step: int
    num_decode: int
    slots: IntArray
    starts: IntArray
    lengths: IntArray
    input_ids: IntArray
    page_table: IntArray
    sample: BoolArray
    out_index: IntArray
    setups: tuple[SlotSetup, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    guided: IntArray = field(default_factory=lambda: NO_ROWS)

    @property
    def num_rows(self) -> int:
        """Requests in this step."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of one drawn token, after bias and penalties, before temperature.

    `top_ids` and `top_logprobs` have as many places as the request asked for, likeliest first.
    """

    logprob: float
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities of tokens that a prompt holds, straight from the model.

    Attributes:
        logprobs: (num_scored,).
        top_ids: (num_scored, num_top), likeliest first.
        top_logprobs: (num_scored, num_top).
    """

    logprobs: FloatArray
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew.

    Attributes:
        token_ids: (rows,) drawn token, -1 in rows that drew none.
        bad: (rows,) the row's logits (of the token it draws or of those it scores) were not numbers, or its mask
            allows nothing; its token is void and its request must end.
        logprobs: row -> of the drawn token, for requests that asked.
        forward_ms: device time of the step, as far as the engine can tell; waiting for masks is left out.
        scores: row -> of the tokens of its prompt, for every row of `Batch.scores`.
        path: how it ran.
    """

    token_ids: IntArray
    bad: BoolArray
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    forward_ms: float = 0.0
    scores: dict[int, PositionLogprobs] = field(default_factory=dict)
    path: StepPath = "eager"
