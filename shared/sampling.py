"""How one choice is sampled: the parameters that travel from the api to the engine, and their bounds.

The api checks a client's values against BOUNDS and names the field it refuses; behind it they are trusted.
"""

from typing import Final, Literal

import msgspec

from shared.dialect import CallShapes, Thoughts

MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 64
MAX_N: Final = 128
MAX_GRAMMAR_BYTES: Final = 128 * 1024
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

BOUNDS: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
    "logit_bias": (-100.0, 100.0),
}
"""Closed intervals per float field; `logit_bias` bounds each of its values."""


GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "calls"]


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What an answer must look like.

    Attributes:
        kind: how to read `text`: a JSON schema, a regular expression that the whole answer matches, a grammar in
            Lark's or llama.cpp's notation, a JSON list of the texts to choose from, or calls of tools.
        text: the schema, expression, grammar or list, or `CallShapes` as JSON.
        lenient: a schema's keywords that cannot be enforced are left aside instead of refused.
        field: the client's field that it came in, for a refusal.
        thoughts: what may be in front of the answer; the grammar begins behind it.
        calls: what the answer may consist of instead.
    """

    kind: GrammarKind
    text: str
    lenient: bool = False
    field: str = "response_format"
    thoughts: Thoughts | None = None
    calls: CallShapes | None = None


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """What the engine needs to draw the tokens of one choice. New fields go last, with a default.

    Attributes:
        max_tokens: tokens to produce at most; None until the tokenizer knows the room the context leaves.
        temperature: 0 is greedy (the first of equals).
        top_k: keep the k likeliest; 0 or -1 keeps all.
        seed: random numbers depend on (seed, index of the token) alone, never on the batch.
        logit_bias: token id -> added to its logit before anything else.
        logprobs: None for none, else how many alternatives (0 to 20) to report beside the token itself.
        min_tokens: end tokens and stop token ids cannot be drawn before this many tokens.
        ignore_eos: the model's end tokens do not end the choice.
        prompt_logprobs: None for none, else how many alternatives to report for each token of the prompt.
        returns_prompt: the prompt's tokens are reported with the first token, whether scored or not.
        grammar: what the answer must look like, or None.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    returns_prompt: bool = False
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature < 1e-5 or self.top_k == 1
