"""The bodies of requests, as clients may write them: field names, types, bounds.

One class per route. A field that is not here is refused by name; a field of `_Ignored` is accepted because
leaving it aside cannot change an answer. Optional fields may be null, which means "not given". What one field
means beside another is decided in `intake.py`.
"""

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.dialect import MAX_FUNCTIONS
from shared.errors import InvalidRequest, PayloadTooLarge
from shared.sampling import BOUNDS, MAX_LOGPROBS, MAX_N, SEED_MAX, SEED_MIN

MAX_TOKENS: Final = 2**31 - 1
MAX_STOP: Final = 4
MAX_STOP_BYTES: Final = 4096
MAX_PROMPTS: Final = 2048
MAX_MESSAGES: Final = 2048
"""Of a conversation, and parts of one message."""

Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Temperature = Annotated[float, Meta(ge=BOUNDS["temperature"][0], le=BOUNDS["temperature"][1])]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=BOUNDS["presence_penalty"][0], le=BOUNDS["presence_penalty"][1])]
Repetition = Annotated[float, Meta(ge=BOUNDS["repetition_penalty"][0], le=BOUNDS["repetition_penalty"][1])]
Choices = Annotated[int, Meta(ge=1, le=MAX_N)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every body: what is not declared is refused."""


class StreamOptions(Strict):
    """How a stream reports usage; obfuscation is padding that we never add."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(Strict):
    """A schema with its name, as OpenAI nests it. Not strict, keywords that cannot be enforced are left aside."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must be: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict):
    """What the answer must be, as vLLM's clients say it; exactly one field is set."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None


class FunctionSpec(Strict):
    """A function a model may be told of."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One tool; functions are the only kind."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionName(Strict):
    """A function that was offered, by its name."""

    name: str


class NamedTool(Strict, tag_field="type", tag="function"):
    """The function that must be called."""

    function: FunctionName


class AllowedFunction(Strict):
    """One of the tools that may be called."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedList(Strict):
    """Some of the tools, and whether one of them must be called."""

    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_FUNCTIONS)]
    mode: Literal["auto", "required"] = "auto"


class AllowedTools(Strict, tag_field="type", tag="allowed_tools"):
    """Which of the tools may be called; all are shown to the model."""

    allowed_tools: AllowedList


class FunctionCall(Strict):
    """A call in the history of a conversation; arguments are what the model wrote, JSON or not."""

    name: str
    arguments: str = ""


class ToolCall(Strict):
    """One tool call in the history of a conversation."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Strict):
    """One turn. The last five fields come back from clients that resend our answers; only their text counts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class _Ignored(Strict):
    """Extras of common clients: names, tags, billing, caching hints. No answer depends on them."""

    user: str | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class Sampling(_Ignored):
    """What all three routes share: how to draw, when to stop, how to answer.

    The last three are SGLang's names for what `structured_outputs` calls regex, grammar and json.
    """

    max_tokens: CountOrZero | None = None
    max_completion_tokens: Count | None = None
    n: Choices | None = None
    seed: Annotated[int, Meta(ge=SEED_MIN, le=SEED_MAX)] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: CountOrZero | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | None = None
    return_token_ids: bool | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: Any = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    audio: None = None
    functions: Any = None
    function_call: Any = None
    web_search_options: None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions. `prompt` is text, token ids, or a list of either; chat's fields may be there as null."""

    model: str
    prompt: Any = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Choices | None = None
    top_logprobs: None = None
    reasoning_effort: None = None
    tools: None = None
    tool_choice: None = None
    parallel_tool_calls: None = None


class GenerateRequest(Sampling, kw_only=True):
    """POST /generate: the plain interface. Streams text lines unless `stream` is false; one choice only."""

    prompt: Any = None
    model: str | None = None


B = TypeVar("B", bound=Strict)

_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}


def parse(kind: type[B], data: bytes) -> B:
    """Read a body.

    Raises:
        InvalidRequest: not JSON, or a field that is unknown, missing, of another type or out of its bounds.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except msgspec.ValidationError as e:
        raise refusal(str(e)) from e
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}", code="invalid_json") from e
    except RecursionError as e:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from e


def refusal(message: str) -> InvalidRequest:
    """Turn a decoder's words ("Expected `int`, got `str` - at `$.n`") into a 400 that names the field."""
    what, _, where = message.partition(" - at `")
    path = where.removesuffix("`").removeprefix("$").removeprefix(".")
    quoted = what.split("`")[1] if "`" in what else ""
    if what.startswith(("Object contains unknown field", "Object missing required field")):
        param = f"{path}.{quoted}" if path else quoted
        verb = "unknown" if "unknown" in what else "missing"
        hint = "; use structured_outputs or response_format" if quoted.startswith("guided_") else ""
        return InvalidRequest(f"{verb} field: {param}{hint}", param=param, code=f"{verb}_field")
    if not path:
        return InvalidRequest(f"the body: {what}", code="invalid_body")
    if what.startswith("Expected `null`,"):
        what = "not supported"  # a field of OpenAI's that is declared only so that it may be null
    return InvalidRequest.of_field(path, what)


def check_tree(value: Any, param: str, max_depth: int) -> None:
    """Bound a free-form part of a body: its depth, and its integers to the 64 bits that travel.

    Raises:
        InvalidRequest: naming `param`.
    """
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > max_depth:
            raise InvalidRequest.of_field(param, f"nested deeper than {max_depth}", "too_deep")
        if isinstance(item, dict):
            stack.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, list):
            stack.extend((child, depth + 1) for child in item)
        elif isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise InvalidRequest.of_field(param, "an integer is beyond 64 bits")


def too_large(limit: int) -> PayloadTooLarge:
    """Make the refusal of a body over its bound."""
    return PayloadTooLarge(f"the body is larger than {limit} bytes", code="body_too_large")
