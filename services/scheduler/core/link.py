"""The Link protocol: what the step loop sees of the broker.

Behind it (inbox and outbox) a thread of its own reads the engine's stream, fences requests ahead of their
admission, replays what was said before, watches aborts and audits; in front of it there are only
requests that may start, requests to forget, and what a step has produced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.core.batch import IntArray, PositionLogprobs, RowLogprobs
from shared.messages import ErrorBody, FinishReason, GenerateRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that this engine speaks for from now on: its log is fenced with `attempt`.

    Attributes:
        request: the request as the tokenizer sent it.
        attempt: number of the fence; every token published for it carries this.
        said_ids: tokens in the log before the fence. They are computed again as part of the prompt, count
            towards max_tokens and penalties, and the next token has index len(said_ids) + 1.
    """

    request: GenerateRequest
    attempt: int
    said_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The tokens of a prompt for a client that asked for them.

    Attributes:
        token_ids: (num_prompt_tokens,).
        scores: pieces that together have a place for every token but the first; empty when no scores were asked for.
    """

    token_ids: IntArray
    scores: Sequence[PositionLogprobs] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of one settled step, as parallel sequences with one place per request that has any.

    Attributes:
        stamp_ns: wall clock when the tokens were known.
        firsts: 1-based index of the first token of that place.
        tokens: one token per place; -1 where a choice ends without one (everything was said before a takeover).
        finishes: place -> reason, for choices that end with this step.
        starts: place -> (prompt tokens, cached prompt tokens), with the first token of an attempt.
        logprobs: place -> of its token, where asked for.
        prompts: place -> its prompt, with the first token of a choice that asked for it.
        complete: places that end with "stop" although their token is part of the text: nothing could follow it.
    """

    stamp_ns: int
    uids: Sequence[str]
    attempts: Sequence[int]
    firsts: Sequence[int]
    tokens: Sequence[int]
    finishes: Mapping[int, FinishReason] = field(default_factory=dict)
    starts: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    prompts: Mapping[int, PromptEcho] = field(default_factory=dict)
    complete: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """What the loop says of itself after each step, and twice a second when idle.

    Attributes:
        num_running: requests with a slot.
        num_ready: arrivals taken from the link that have no slot yet.
        free_slots: how many more could run; the link fences about this many ahead.
        free_pages: pages neither live nor needed by the cache.
    """

    num_running: int
    num_ready: int
    free_slots: int
    free_pages: int
    queued_tokens: int = 0
    tokens_per_s: float = 0.0


class Link(Protocol):
    """The loop's side of the broker. Every method returns at once except `idle` and `await_look`."""

    @property
    def paused(self) -> bool:
        """Whether stepping must wait: the token streams are full, or the lease cannot be kept."""
        ...

    def arrivals(self) -> list[Arrival]:
        """Take the requests that may start. A uid that runs already with a lower attempt is replaced."""
        ...

    def endings(self) -> list[tuple[str, int]]:
        """Take (uid, attempt) of requests to forget: ended or taken over elsewhere. Nothing more is said of them."""
        ...

    def await_look(self) -> float:
        """Wait, if need be, until one more step may be planned.

        That is when a look at what has ended is taken in that began after the last step but one was planned: at most
        two steps are planned with a request that has ended.

        Returns:
            Seconds waited: nearly always 0, as the look is made while steps run; a short time at most, where the
            broker does not answer.
        """
        ...

    def planned(self) -> None:
        """Note that a step was planned."""
        ...

    def publish(self, output: StepOutput) -> None:
        """Hand over a step's tokens; they reach the broker in order."""
        ...

    def fail(self, uid: str, attempt: int, error: ErrorBody) -> None:
        """End a request with an error; the loop has forgotten it already."""
        ...

    def report(self, load: Load) -> None:
        """Beat: the loop lives, and this is its load."""
        ...

    def idle(self, timeout_s: float) -> None:
        """Sleep until there is an arrival or an ending, or the time is over."""
        ...
