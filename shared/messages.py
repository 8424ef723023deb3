"""Every struct that crosses a process boundary, and nothing else. docs/messages.md explains each field's use.

All are msgpack arrays with a tag in front, so a reader that meets the wrong kind says so. A message only
grows at its end, with a default; a field is never retyped, reordered or removed within one WIRE_VERSION.
`tests/contract/test_messages_golden.py` holds the bytes of each.
"""

from typing import Any, Final, Literal, TypeVar

import msgspec

from shared.dialect import Dialect, Outline
from shared.errors import WireError
from shared.sampling import SamplingParams

WIRE_VERSION: Final = 1

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Purpose = Literal["generate", "tokenize", "detokenize"]


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False, tag_field="tag"):
    """Base of every wire struct. Out of the garbage collector's sight, since none holds itself."""


class ErrorBody(Message, tag="err", frozen=True):
    """Why a request failed, in the words its client reads. `status` is the HTTP status it would have had."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None


class LogprobEntry(Message, frozen=True):
    """One token with its log probability; `token` is its bytes, which need not be valid UTF-8."""

    token_id: int
    logprob: float
    token: bytes = b""
    top: list[tuple[int, float, bytes]] = []


class Prompt(Message, frozen=True):
    """One prompt of a request: exactly one of the three is set. Messages are OpenAI's, with text content only."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


class TokenizeRequest(Message, tag="tokenize", frozen=True):
    """One HTTP request, on its way to any tokenizer. `uids` holds `n` choices of prompt 0, then of prompt 1, ..."""

    uids: list[str]
    prompts: list[Prompt]
    n: int
    seeds: list[int]
    params: SamplingParams
    model: str
    request_id: str = ""
    tenant: str = ""
    priority: int = 0
    arrival_ms: int = 0
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    cache_salt: str = ""
    traceparent: str = ""
    purpose: Purpose = "generate"
    add_special: bool = True
    default_limit: bool = False


class GenerateRequest(Message, tag="generate", frozen=True):
    """One choice, ready for an engine. `params.max_tokens` is set and fits the context."""

    uid: str
    prompt_ids: list[int]
    params: SamplingParams
    request_id: str = ""
    tenant: str = ""
    priority: int = 0
    arrival_ms: int = 0
    cache_salt: str = ""
    traceparent: str = ""


class StepChunk(Message, tag="step", frozen=True):
    """What one engine step produced for the uids of one shard, as parallel arrays with one place per uid.

    Attributes:
        stamp_ns: wall clock when the step's tokens were known, for measuring the way to the client.
        firsts: index of the first token in `tokens` of that uid; the first token of a choice has index 1.
        counts: tokens per uid; empty when each has exactly one.
        finishes: place -> how the choice ended with this step.
        starts: place -> (prompt tokens, cached prompt tokens), in the first chunk of an attempt.
        logprobs: place -> one entry per token, without bytes (the detokenizer adds them).
        prompts: place -> one entry per token of the prompt, likewise, with the first token of a choice that asked
            for them. The first entry has no log probability (0 without alternatives), nor has any if none were asked.
        complete: places that end with "stop" although their last token is part of the text, as nothing could follow.
    """

    engine: str
    stamp_ns: int
    uids: list[str]
    attempts: list[int]
    firsts: list[int]
    tokens: list[int]
    counts: list[int] = []
    finishes: dict[int, FinishReason] = {}
    starts: dict[int, tuple[int, int]] = {}
    logprobs: dict[int, list[LogprobEntry]] = {}
    prompts: dict[int, list[LogprobEntry]] = {}
    complete: list[int] = []


class ReplyHeader(Message, tag="header", frozen=True):
    """Head of a reply log (entry `o`): all a detokenizer or another api replica must know about a uid."""

    replica: str
    stop: list[str] = []
    include_stop: bool = False
    skip_special: bool = True
    key_hash: str = ""
    resumable_ms: int = 0
    request_id: str = ""
    index: int = 0
    outline: Outline | None = None
    traceparent: str = ""


class FenceHeader(Message, tag="fence", frozen=True):
    """Who speaks from a fence on (entry `f`), and what decoding needs of the prompt."""

    engine: str
    entry: str
    prompt_tokens: int
    prompt_tail: list[int] = []


class Said(Message, tag="said", frozen=True):
    """What a client was told before its log was opened again (entry `o`).

    What follows the text is there for those who come to read the log later, of a reply that can be resumed.
    """

    token_ids: list[int]
    text: str
    logprobs: list[LogprobEntry] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt: list[LogprobEntry] = []


class Delta(Message, tag="delta", frozen=True):
    """What one flush adds to a reply (entry `t`), or how it ended (entry `e`, with `finish` or `error` set).

    `first` is the index of the first of `token_ids`. Text may lag behind the tokens (a character or a stop
    string in the making) but is a function of the tokens said so far, so any detokenizer cuts it alike.
    `prompt` is there in the delta that begins a reply, if its choice asked for it; see `StepChunk.prompts`.
    """

    first: int
    token_ids: list[int]
    text: str
    logprobs: list[LogprobEntry] = []
    finish: FinishReason | None = None
    error: ErrorBody | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stamp_ns: int = 0
    prompt: list[LogprobEntry] = []

    @property
    def ends(self) -> bool:
        """Whether nothing follows."""
        return self.finish is not None or self.error is not None


class Heartbeat(Message, tag="beat", frozen=True):
    """What an instance says of itself twice a second. `beat` counts up; a value that stands still is a dead lease.

    From `fingerprint` to `num_taken` it is for engines: `fingerprint` names weights, dtype and revision, and only
    engines of equal fingerprint take requests over from each other. `num_said` and the two counts are an api's:
    what its clients have got, and how long they waited for it; `num_resumed` is what it gives to clients that came
    back, which is not in `num_running`, because it is in hand where it was opened. `dialect` is a tokenizer's.
    Counters begin at the start of the instance. `birth` is the mark of whoever started the process, who alone
    writes `ended`, when it has ended.
    """

    beat: int
    name: str
    version: str = ""
    model: str = ""
    draining: bool = False
    port: int = 0
    fingerprint: str = ""
    max_seq_len: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_tokens: int = 0
    max_running: int = 0
    free_pages: int = 0
    num_pages: int = 0
    page_size: int = 0
    tokens_per_s: float = 0.0
    cached_pages: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    num_taken: int = 0
    num_said: int = 0
    ttft_counts: list[int] = []
    gap_counts: list[int] = []
    dialect: Dialect | None = None
    birth: str = ""
    ended: bool = False
    num_resumed: int = 0


class DeadLetter(Message, tag="dead", frozen=True):
    """A request or a message that was given up, for `launcher dead`."""

    uid: str
    reason: str
    tries: int
    source: str
    at_ms: int
    body: bytes = b""


M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    """Pack a message for the wire."""
    return _encoder.encode(message)


def decode(kind: type[M], data: bytes | msgspec.Raw) -> M:
    """Unpack a message.

    Raises:
        WireError: the bytes are not a message of that kind.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise WireError(f"not a {kind.__name__}: {e}") from e
