"""Req: one choice as scheduling sees it.

Knows nothing of pages or batches. What changes every step (lengths, tokens) lies in the slot table while the
request has a slot, so that steps are settled with arrays; what is here changes only when it starts or stops.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.batch import IntArray, PositionLogprobs
from services.scheduler.core.link import Arrival
from services.scheduler.core.ports import EngineLimits
from shared.errors import ContextLengthExceeded, InvalidRequest, RequestError
from shared.messages import ErrorBody
from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from services.scheduler.core.guides import Matcher


@dataclass(slots=True, eq=False)
class Req:
    """One choice, from its arrival to its end.

    Attributes:
        uid: which choice.
        attempt: number of the fence under which it speaks.
        params: how its tokens are drawn.
        namespace: prefixes are shared only within it.
        token_ids: (known_len,) prompt and tokens drawn so far, as of its last start.
        prompt_len: of these, the client's prompt.
        end_len: tokens of prompt and answer at which it ends by length.
        order: who goes first, and who is retracted last: (priority, number of its arrival).
        twin_key: equal for requests with the same prompt.
        slot: its slot, or -1.
        planned_len: while it is prefilled, tokens whose KV the launched steps will have computed.
        verified: since its last start a token was drawn from sound logits, so its KV is fit for the cache.
        announced: its prompt and cached tokens were published.
        cached_len: tokens the prefix cache gave at its first start.
        was_resumed: some of its answer was said before it arrived here.
        scores: of its prompt, as far as computed and not published.
        matcher: follows its grammar, if it has one and that is compiled.
    """

    uid: str
    attempt: int
    params: SamplingParams
    namespace: str
    token_ids: IntArray
    prompt_len: int
    end_len: int
    order: tuple[int, int]
    twin_key: int
    slot: int = -1
    planned_len: int = 0
    verified: bool = False
    announced: bool = False
    cached_len: int = -1
    was_resumed: bool = False
    scores: list[PositionLogprobs] = field(default_factory=list)
    matcher: "Matcher | None" = None

    @property
    def is_scored(self) -> bool:
        """Whether the tokens of its prompt are still to be scored."""
        return self.params.prompt_logprobs is not None and not self.announced and not self.was_resumed

    @property
    def known_len(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.token_ids)

    @property
    def output_ids(self) -> IntArray:
        """Tokens drawn before its last start."""
        return self.token_ids[self.prompt_len :]


def make_req(arrival: Arrival, limits: EngineLimits, number: int) -> Req:
    """Build a Req from an arrival.

    A max_tokens that the pool or the context cannot hold is cut to what they can: the choice ends by length there.

    Raises:
        ContextLengthExceeded: the prompt leaves no room for a token, so it could never run.
        InvalidRequest: an id is outside the vocabulary and would bring the engine down.
    """
    request, params = arrival.request, arrival.request.params
    token_ids = _checked_ids([*request.prompt_ids, *arrival.said_ids], limits.vocab_size)
    if not all(0 <= token_id < limits.vocab_size for token_id in params.logit_bias):
        raise InvalidRequest("logit_bias names a token id outside the vocabulary.", param="logit_bias")
    prompt_len = len(request.prompt_ids)
    # The last token of a choice needs no KV.
    room = min(limits.max_seq_len, limits.num_pages * limits.page_size + 1)
    if prompt_len + 1 > room:
        raise ContextLengthExceeded(
            f"The prompt has {prompt_len} tokens; this engine can hold {room - 1} at most, and one to answer."
        )
    max_tokens = params.max_tokens if params.max_tokens is not None else room
    return Req(
        uid=request.uid,
        attempt=arrival.attempt,
        params=params,
        namespace=request.cache_salt,
        token_ids=token_ids,
        prompt_len=prompt_len,
        end_len=min(prompt_len + max_tokens, room),
        order=(request.priority, number),
        twin_key=hash((request.cache_salt, token_ids[:prompt_len].tobytes())),
        was_resumed=bool(arrival.said_ids),
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended with an error; the scheduler has forgotten it."""

    uid: str
    attempt: int
    error: ErrorBody

    @classmethod
    def of(cls, uid: str, attempt: int, error: RequestError) -> "Failure":
        """Put an error into the words of the wire."""
        return cls(uid, attempt, ErrorBody(error.status, error.message, error.type, error.code, error.param))


def _checked_ids(ids: Sequence[int], vocab_size: int) -> IntArray:
    if not ids:
        raise InvalidRequest("The prompt is empty.", param="prompt")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidRequest("The prompt holds a token id outside the vocabulary.", param="prompt")
    return np.asarray(ids, np.int32)
