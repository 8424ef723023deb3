"""The bytes of answers: SSE chunks and whole bodies of chat, completions and the plain interface.

What is the same in all chunks of a stream is written once; per chunk only the text is escaped. Knows jobs and
choices, not the connection.
"""

import time
from typing import Any, Final, Protocol

import msgspec

from services.api.error_body import encode_error
from services.api.exchange import Choice, Exchange, count_usage
from services.api.logprobs import CompletionLogprobs, chat_entries, decode_prompt, encode_chat
from shared.messages import Delta, ErrorBody, LogprobEntry

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"

_json = msgspec.json.encode


def usage_of(exchange: Exchange) -> dict[str, Any]:
    """Count the tokens of a request as OpenAI reports them."""
    prompt, cached, completion = count_usage(exchange)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Format(Protocol):
    """How one interface writes its answers. One instance per request; choices are named by their index."""

    def begin(self) -> bytes:
        """Give what comes before the first delta of any choice."""
        ...

    def delta(self, choice: Choice, text: str, logprobs: list[LogprobEntry], ended: Delta | None) -> bytes:
        """Give the chunks of one choice: its new text, and its finish if it ended."""
        ...

    def end(self) -> bytes:
        """Give what follows the last choice's finish."""
        ...

    def error(self, error: ErrorBody) -> bytes:
        """Give the event that ends a stream which failed; nothing follows it."""
        ...

    def whole(self, logprobs: list[list[LogprobEntry]]) -> bytes:
        """Give the body of an answer that is not streamed; all choices have ended well."""
        ...


class OpenAiFormat:
    """What chat and completions share: the envelope, usage, the end and errors."""

    object_stream = ""
    object_whole = ""
    id_prefix = ""

    def __init__(self, exchange: Exchange, fingerprint: str) -> None:
        job = exchange.job
        self._exchange = exchange
        self._job = job
        self._id = f"{self.id_prefix}-{job.uids[0]}"
        self._created = job.created or int(time.time())
        self._fingerprint = fingerprint
        self._head = b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"system_fingerprint":%s,"choices":[' % (
            _json(self._id), _json(self.object_stream), self._created, _json(job.model), _json(fingerprint),
        )  # fmt: skip
        self._heads = [self._head + b'{"index":%d,' % i for i in range(job.num_choices)]
        self._tail = b'}],"usage":null}\n\n' if job.include_usage else b"}]}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null' + self._tail

    def begin(self) -> bytes:
        """Give nothing: only chat has something to say first."""
        return b""

    def end(self) -> bytes:
        """Give the usage chunk, if it was asked for, and the end mark."""
        if not self._job.include_usage:
            return DONE
        return self._head + b'],"usage":%s}\n\n' % _json(usage_of(self._exchange)) + DONE

    def error(self, error: ErrorBody) -> bytes:
        """Give the error event."""
        return b"data: %s\n\n" % encode_error(error)

    def _closing(self) -> bytes:
        if self._job.continuous_usage:
            return b'}],"usage":%s}\n\n' % _json(usage_of(self._exchange))
        return self._tail

    def _body(self, choices: list[dict[str, Any]]) -> bytes:
        return _json(
            {
                "id": self._id,
                "object": self.object_whole,
                "created": self._created,
                "model": self._job.model,
                "system_fingerprint": self._fingerprint,
                "choices": choices,
                "usage": usage_of(self._exchange),
            }
        )


class ChatFormat(OpenAiFormat):
    """/v1/chat/completions."""

    object_stream = "chat.completion.chunk"
    object_whole = "chat.completion"
    id_prefix = "chatcmpl"

    def begin(self) -> bytes:
        """Give the role chunk of every choice."""
        role = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null'
        return b"".join(head + role + self._closing() for head in self._heads)

    def delta(self, choice: Choice, text: str, logprobs: list[LogprobEntry], ended: Delta | None) -> bytes:
        """Give a content chunk and, at the end, a finish chunk of its own."""
        head = self._heads[choice.index]
        out = b""
        if logprobs:
            out = head + b'"delta":{"content":%s},"logprobs":%s,"finish_reason":null%s' % (
                _json(text), encode_chat(logprobs), self._closing(),
            )  # fmt: skip
        elif text:
            tail = self._plain_tail
            if self._job.continuous_usage:
                tail = b',"logprobs":null,"finish_reason":null' + self._closing()
            out = head + b'"delta":{"content":' + _json(text) + b"}" + tail
        if ended is not None:
            out += head + b'"delta":{},"logprobs":null,"finish_reason":%s%s' % (_json(ended.finish), self._closing())
        return out

    def whole(self, logprobs: list[list[LogprobEntry]]) -> bytes:
        """Give the `chat.completion` object."""
        choices = []
        for choice in self._exchange.choices:
            lists = None
            if self._job.logprobs is not None:
                lists = {"content": chat_entries(logprobs[choice.index]), "refusal": None}
            assert choice.ended is not None, "only complete answers are written"
            choices.append(
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": lists,
                    "finish_reason": choice.ended.finish,
                }
            )
        return self._body(choices)


class CompletionFormat(OpenAiFormat):
    """/v1/completions."""

    object_stream = object_whole = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, exchange: Exchange, fingerprint: str) -> None:
        super().__init__(exchange, fingerprint)
        self._logprobs = [CompletionLogprobs() for _ in exchange.choices] if self._job.logprobs is not None else []
        self._unechoed = set() if self._job.echo is None else {choice.index for choice in exchange.choices}

    def begin(self) -> bytes:
        """Give the prompts that are to be echoed, as far as they are known before the engine says them."""
        if self._logprobs:
            return b""
        known = [choice for choice in self._exchange.choices if self._echo_text(choice) is not None]
        return b"".join(self._echo(choice) for choice in known if choice.index in self._unechoed)

    def _echo_text(self, choice: Choice) -> str | None:
        """Give a choice's prompt, if it is echoed and known."""
        text = self._job.echo[choice.index // self._job.n] if self._job.echo is not None else ""
        return decode_prompt(choice.prompt) if text is None and choice.prompt else text

    def _echo(self, choice: Choice) -> bytes:
        """Give the chunk of a choice's prompt; once."""
        self._unechoed.discard(choice.index)
        text = self._echo_text(choice) or ""
        lists = b"null"
        if self._logprobs:
            lists = _json(self._logprobs[choice.index].take_prompt(choice.prompt, text))
        head = self._heads[choice.index]
        return head + b'"text":%s,"logprobs":%s,"finish_reason":null%s' % (_json(text), lists, self._closing())

    def delta(self, choice: Choice, text: str, logprobs: list[LogprobEntry], ended: Delta | None) -> bytes:
        """Give a text chunk and, at the end, a finish chunk with an empty text."""
        head = self._heads[choice.index]
        out = self._echo(choice) if choice.index in self._unechoed else b""
        if logprobs:
            lists = _json(self._logprobs[choice.index].take(logprobs))
            out += head + b'"text":%s,"logprobs":%s,"finish_reason":null%s' % (_json(text), lists, self._closing())
        elif text:
            tail = self._plain_tail
            if self._job.continuous_usage:
                tail = b',"logprobs":null,"finish_reason":null' + self._closing()
            out += head + b'"text":' + _json(text) + tail
        if ended is not None:
            out += head + b'"text":"","logprobs":null,"finish_reason":%s%s' % (_json(ended.finish), self._closing())
        return out

    def whole(self, logprobs: list[list[LogprobEntry]]) -> bytes:
        """Give the `text_completion` object."""
        choices = []
        for choice in self._exchange.choices:
            echo = self._echo_text(choice) or ""
            lists = None
            if self._logprobs:
                form = self._logprobs[choice.index]
                before = form.take_prompt(choice.prompt, echo) if self._unechoed else {}
                after = form.take(logprobs[choice.index])
                lists = {key: before.get(key, []) + values for key, values in after.items()}
            assert choice.ended is not None, "only complete answers are written"
            choices.append(
                {
                    "index": choice.index,
                    "text": echo + choice.text,
                    "logprobs": lists,
                    "finish_reason": choice.ended.finish,
                }
            )
        return self._body(choices)


class PlainFormat:
    """/generate: each event's data is plain text, one `data:` line per line of it, as SSE wants."""

    def __init__(self, exchange: Exchange, fingerprint: str) -> None:
        self._exchange = exchange
        self._fingerprint = fingerprint

    def begin(self) -> bytes:
        """Give nothing."""
        return b""

    def delta(self, choice: Choice, text: str, logprobs: list[LogprobEntry], ended: Delta | None) -> bytes:
        """Give one event with the new text."""
        return event(text) if text else b""

    def end(self) -> bytes:
        """Give the end mark."""
        return DONE

    def error(self, error: ErrorBody) -> bytes:
        """Give an event of the type `error`, so that it cannot be taken for text."""
        return b"event: error\ndata: %s\n\n" % encode_error(error)

    def whole(self, logprobs: list[list[LogprobEntry]]) -> bytes:
        """Give the text with its usage."""
        choice = self._exchange.choices[0]
        assert choice.ended is not None, "only complete answers are written"
        return _json({"text": choice.text, "finish_reason": choice.ended.finish, "usage": usage_of(self._exchange)})


def event(text: str) -> bytes:
    """Frame text as one SSE event; readers join its lines with line breaks and get the text back."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return b"".join(b"data: " + line.encode() + b"\n" for line in lines) + b"\n"


def make_format(exchange: Exchange, fingerprint: str) -> Format:
    """Choose how a job's answer is written."""
    kinds: dict[str, type[ChatFormat | CompletionFormat | PlainFormat]] = {
        "chat": ChatFormat,
        "completion": CompletionFormat,
        "generate": PlainFormat,
    }
    return kinds[exchange.job.kind](exchange, fingerprint)
