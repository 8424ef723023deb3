"""Batch and StepResult: what one engine step is given and gives back, as plain arrays.

This is the only language in which scheduling and the engine speak. A row is one request in one step: a
decode row computes one token, a prefill row a chunk of its prompt. Decode rows come first.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.sampling import SamplingParams

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]

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
class StepResult:
    """What a step drew.

    Attributes:
        token_ids: (rows,) drawn token, -1 in rows that drew none.
        bad: (rows,) the row's logits were not numbers; its token is void and its request must end.
        logprobs: row -> of the drawn token, for requests that asked.
        forward_ms: device time of the step, as far as the engine can tell.
    """

    token_ids: IntArray
    bad: BoolArray
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    forward_ms: float = 0.0
