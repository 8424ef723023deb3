"""Requests as the api sends them, for tests of the tokenizer."""

from collections.abc import Sequence
from typing import Any

from shared.ids import new_uid
from shared.messages import Prompt, TokenizeRequest
from shared.sampling import SamplingParams

MODEL = "test-model"


def make_request(
    *prompts: str | list[int] | list[dict[str, Any]] | None,
    n: int = 1,
    max_tokens: int | None = 5,
    uids: Sequence[str] = (),
    params: dict[str, Any] | None = None,
    **fields: Any,
) -> TokenizeRequest:
    """Make a request: a prompt is a text, token ids, or messages."""
    count = len(prompts) * n
    return TokenizeRequest(
        uids=list(uids) or [new_uid() for _ in range(count)],
        prompts=[_prompt(p) for p in prompts],
        n=n,
        seeds=list(range(100, 100 + count)),
        params=SamplingParams(max_tokens=max_tokens, **(params or {})),
        model=MODEL,
        **fields,
    )


def _prompt(prompt: Any) -> Prompt:
    if prompt is None or isinstance(prompt, str):
        return Prompt(text=prompt or "")
    if prompt and isinstance(prompt[0], dict):
        return Prompt(messages=prompt)
    return Prompt(token_ids=prompt)


def chat(text: str) -> list[dict[str, Any]]:
    """Make a conversation of one message."""
    return [{"role": "user", "content": text}]
