"""Ids of a text and text of ids: the bodies of the two routes, their jobs, and their answers.

A conversation is read and rendered just as a chat request's would be, so its count is what that request would have.
The work is a tokenizer's, over the same queue and logs as generation, so it survives the same faults; no engine has
a part in it. Knows neither HTTP nor the broker.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from services.api.exchange import Exchange
from services.api.intake import chat_job, completion_job
from services.api.job import Job
from services.api.schema import ChatMessage, ChatRequest, CompletionRequest, Strict, Tool, parse
from shared.dialect import Dialect
from shared.errors import InvalidRequest

DEADLINE_S: Final = 30.0
"""What a client is answered within, when it names no shorter time."""
MAX_ID: Final = 2**31 - 1


class TokenizeBody(Strict):
    """POST /tokenize: `prompt`, or `messages` with what a chat request may say beside them; vLLM's fields."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    tokens: list[Annotated[int, Meta(ge=0, le=MAX_ID)]]
    model: str | None = None


class TokenizeAnswer(msgspec.Struct):
    """The ids of a prompt. `max_model_len` is what prompt and answer may have together, if an engine says so."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(msgspec.Struct):
    """The text of ids, special tokens included."""

    prompt: str


def tokenize_job(data: bytes, default_model: str, max_depth: int, dialect: Callable[[str], Dialect | None]) -> Job:
    """Check a body of /tokenize.

    Args:
        data: the body.
        default_model: of a body that names none.
        max_depth: nesting of its free-form parts.
        dialect: of a model, as far as it is known; tools are rendered by it.

    Raises:
        InvalidRequest: naming the field.
    """
    body = parse(TokenizeBody, data)
    model = body.model or default_model
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("exactly one of prompt and messages is needed", param="prompt", code="invalid_value")
    if body.messages is None:
        job = completion_job(CompletionRequest(model=model, prompt=body.prompt), max_depth)
    else:
        chat = ChatRequest(
            model=model,
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        job = chat_job(chat, max_depth, dialect(model))
    job.kind = "tokenize"
    job.add_special = body.add_special_tokens is not False
    job.wants_texts = bool(body.return_token_strs)
    return job


def detokenize_job(data: bytes, default_model: str, max_depth: int, _: Callable[[str], Dialect | None]) -> Job:
    """Check a body of /detokenize. As `tokenize_job`, but that no dialect is needed."""
    body = parse(DetokenizeBody, data)
    job = completion_job(CompletionRequest(model=body.model or default_model, prompt=body.tokens or [0]), max_depth)
    job.prompts = [msgspec.structs.replace(job.prompts[0], token_ids=body.tokens)]
    job.kind = "detokenize"
    return job


def make_body(exchange: Exchange, max_model_len: int) -> bytes:
    """Write the answer of a job that has ended well."""
    [choice] = exchange.choices
    if exchange.job.kind == "detokenize":
        return msgspec.json.encode(DetokenizeAnswer(choice.text))
    texts = [entry.token.decode("utf-8", "replace") for entry in choice.prompt] if exchange.job.wants_texts else None
    ids = [entry.token_id for entry in choice.prompt]
    return msgspec.json.encode(TokenizeAnswer(len(ids), max_model_len or None, ids, texts))
