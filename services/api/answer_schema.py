"""The answers of the api as its description tells them. For speed they are written elsewhere; tests compare."""

from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ErrorDetail(msgspec.Struct):
    """What went wrong; `param` names the field to blame, `code` is for machines."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every error, in answers and as the last event of a stream that failed."""

    error: ErrorDetail


class Usage(msgspec.Struct):
    """Tokens of a request: each prompt once, all choices' answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class CalledFunction(msgspec.Struct):
    """A function as the model calls it; the arguments are JSON in a string."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    """One call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(msgspec.Struct):
    """What the assistant says, calls, and thought before."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[CalledTool] | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct):
    """One answer of a chat; its token ids are there where they were asked for."""

    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """The whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextChoice(msgspec.Struct):
    """One continuation of a text; its token ids and its prompt's are there where they were asked for."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(msgspec.Struct):
    """The whole answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    system_fingerprint: str | None = None


class PlainAnswer(msgspec.Struct):
    """The whole answer of /generate."""

    text: str
    finish_reason: FinishReason
    usage: Usage


class ModelCard(msgspec.Struct):
    """A served model; `max_model_len` is there once an engine has said it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Readiness(msgspec.Struct):
    """Whether requests would be served, and what is missing if not."""

    ready: bool
    missing: list[str]


class Liveness(msgspec.Struct):
    """The process lives."""

    alive: bool


class Startup(msgspec.Struct):
    """Whether starting is over."""

    started: bool
    missing: list[str]


class Version(msgspec.Struct):
    """The release."""

    version: str
