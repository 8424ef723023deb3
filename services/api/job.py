"""What one HTTP request asks for, once it is checked: the meeting point of routes, replies and answers.

Plain data without behaviour beyond arithmetic. Knows neither HTTP nor the broker.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from shared.broker.limits import Claim, Limits
from shared.dialect import Outline
from shared.ids import new_uid
from shared.messages import Prompt, Purpose
from shared.sampling import SamplingParams

Kind = Literal["chat", "completion", "generate", "tokenize", "detokenize"]

_MASK = 2**64 - 1


def mix_seed(seed: int, choice: int) -> int:
    """Derive the seed of a choice: choice 0 keeps the request's, the others get one far from it (splitmix64).

    Args:
        seed: signed 64 bits.
        choice: place within its prompt, so that a prompt draws alike alone and in a list.
    """
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


@dataclass(slots=True)
class Job:
    """A checked request.

    Attributes:
        prompts: one per list entry; choice `i` belongs to prompt `i // n`.
        seed: of the request, given or drawn.
        echo: per prompt the text in front of its answer, None in it where the prompt came as ids and the engine
            returns them; None where nothing is echoed.
        timeout_s: deadline from the client, or None.
        resume_ms: how long the stream waits for a client to come back; 0 for one that cannot be resumed.
        created, fingerprint: what a stream that can be resumed says of itself, whoever writes it.
        outline: what is taken out of the text of its answers, or None.
        returns_ids: token ids are part of the answer.
        add_special: texts begin with the tokens that every prompt begins with; only /tokenize can say no.
        default_limit: `max_tokens` is a default of ours, which gives way where less than that has room.
        wants_texts: /tokenize gives the text of every token.
        cost_bytes: what the request weighs while it is unfinished (its body).
        limits: of its API key.
        claim: what it takes of them; None where there are none.
    """

    kind: Kind
    model: str
    prompts: list[Prompt]
    n: int
    params: SamplingParams
    seed: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stop: list[str] = field(default_factory=list)
    include_stop: bool = False
    skip_special: bool = True
    echo: list[str | None] | None = None
    logprobs: int | None = None
    timeout_s: float | None = None
    priority: int = 0
    cache_salt: str = ""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special: bool = True
    default_limit: bool = False
    wants_texts: bool = False
    cost_bytes: int = 0
    request_id: str = ""
    arrival_ms: int = 0
    traceparent: str = ""
    tenant: str = ""
    key_hash: str = ""
    limits: Limits = field(default_factory=Limits)
    claim: Claim | None = None
    uids: list[str] = field(default_factory=list)
    resume_ms: int = 0
    created: int = 0
    fingerprint: str = ""
    outline: Outline | None = None
    returns_ids: bool = False

    @property
    def purpose(self) -> Purpose:
        """What a tokenizer is to do with it."""
        return self.kind if self.kind in ("tokenize", "detokenize") else "generate"

    @property
    def response_id(self) -> str:
        """Id of the answer, as its client sees it; there once the choices have names."""
        return f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.uids[0]}"

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.n

    def name_choices(self) -> None:
        """Give every choice its uid."""
        self.uids = [new_uid() for _ in range(self.num_choices)]

    def seed_of(self, choice: int) -> int:
        """Give the seed of a choice (its index over all prompts)."""
        return mix_seed(self.seed, choice % self.n)
