"""What is asked: a pool of requests of every kind, whose answers are known because they were asked before any fault.

Every answer is a function of its request: greedy ones of the prompt, drawn ones of prompt and seed. So any telling
of one can be compared with any other, token by token.
"""

import random
from dataclasses import dataclass, field
from typing import Any, Final

Json = dict[str, Any]

POISON, NAN = (1, 2, 3), (1, 2, 4)
"""Prompts, as ids, on which the fake engine dies, or computes no numbers."""
_LONG: Final = {"0": -100, "2": -100}
"""Bans the end tokens of the embedded model, so that an answer has max_tokens tokens."""
_WORDS: Final = ("mill", "race", "water", "wheel", "stone", "flour", "weir", "sluice", "dam", "grain")


@dataclass(slots=True, eq=False)
class Ask:
    """A request, and its answer when nothing happens.

    Attributes:
        kind: what is special about it.
        path: where it is sent.
        body: its JSON.
        resumes: its client comes back to the stream when the connection breaks.
        answer: choice -> what is said in it, one string per token where the client can tell tokens apart.
        tokens: of all choices, as the server counts them.
    """

    kind: str
    path: str
    body: Json
    resumes: bool = False
    answer: dict[int, list[str]] = field(default_factory=dict)
    tokens: int = 0

    @property
    def streams(self) -> bool:
        """Whether it is answered piece by piece."""
        return bool(self.body.get("stream"))


def make_pool(seed: int, model: str, size: int, *, real: bool) -> list[Ask]:
    """Make requests that all differ, of every kind in turn."""
    rng = random.Random(f"requests {seed}")
    makers: list[tuple[str, Json]] = [
        ("completion", {}), ("chat", {}), ("whole", {"stream": False}), ("choices", {"n": 2, "temperature": 0.9}),
        ("logprobs", {"logprobs": 2}), ("stop", {"stop": ["zq", "e"]}), ("guided", {"regex": "[a-z]{30,60}"}),
        ("penalties", {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.7}),
        ("priority", {"priority": 3}), ("prompts", {}), ("resumable", {}), ("resumable choices", {"n": 2}),
        ("whole choices", {"stream": False, "n": 2, "temperature": 1.0}),
    ]  # fmt: skip
    return [_make(rng, model, number, *makers[number % len(makers)], real=real) for number in range(size)]


def _make(rng: random.Random, model: str, number: int, kind: str, fields: Json, *, real: bool) -> Ask:
    prompt = f"{number} " + " ".join(rng.choices(_WORDS, k=rng.randint(2, 30)))
    length = rng.randint(8, 32) if real else rng.randint(30, 150)
    body: Json = {"model": model, "max_tokens": length, "temperature": 0, "seed": rng.randrange(2**31), "stream": True}
    body |= fields
    if kind not in ("guided", "stop"):
        body["ignore_eos"] = True
    if real:
        body["logit_bias"] = _LONG if kind != "guided" else {}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
        return Ask(kind, "/v1/chat/completions", body)
    if real and kind not in ("chat", "guided", "stop"):
        body.setdefault("logprobs", 0)
    body["prompt"] = [prompt, prompt[::-1]] if kind == "prompts" else prompt
    return Ask(kind, "/v1/completions", body, kind.startswith("resumable"))


def poison(model: str, marker: tuple[int, ...]) -> Ask:
    """Make a request on which a fake engine dies or computes no numbers."""
    body = {"model": model, "prompt": list(marker), "max_tokens": 5, "ignore_eos": True, "stream": True}
    return Ask("poison", "/v1/completions", body)


def hostile(model: str) -> list[tuple[Ask, int]]:
    """Make requests that must be refused, each with its status."""
    base = {"model": model, "prompt": "x", "max_tokens": 5}
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    return [
        (Ask("oversized", "/v1/completions", {**base, "prompt": "x" * (17 << 20)}), 413),
        (Ask("deep", "/v1/completions", {**base, "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": deep}}}), 400),
        (Ask("regex", "/v1/completions", {**base, "regex": "((a{1,999}){1,999}){1,999}(b"}), 400),
        (Ask("too long", "/v1/completions", {**base, "prompt": "x" * 500_000}), 400),
    ]  # fmt: skip
