"""The bytes of answers: SSE chunks and whole bodies of chat, completions and the plain interface.

What is the same in all chunks of a stream is written once; per chunk only the text is escaped. Knows jobs and
choices, not the connection.
"""

import time
from typing import Any, Final, Protocol

import msgspec

from services.api.answers.chat import SpokenChoice
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


def prompt_ids(choice: Choice) -> list[int]:
    """Give the token ids of a choice's prompt."""
    return [entry.token_id for entry in choice.prompt]


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

    def __init__(self, exchange: Exchange, fingerprint: str) -> None:
        job = exchange.job
        self._exchange = exchange
        self._job = job
        self._created = job.created or int(time.time())
        self._fingerprint = fingerprint
        self._head = b'data: {"id":%s,"object":%s,"created":%d,"model":%s,"system_fingerprint":%s,"choices":[' % (
            _json(job.response_id), _json(self.object_stream), self._created, _json(job.model), _json(fingerprint),
        )  # fmt: skip
        self._heads = [self._head + b'{"index":%d,' % i for i in range(job.num_choices)]
        self._tail = b'}],"usage":null}\n\n' if job.include_usage else b"}]}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null' + self._tail
        self._ids_said = [0] * job.num_choices
        self._prompts_said: set[int] = set()

    def begin(self) -> bytes:
        """Give nothing: only chat has something to say first."""
        return b""

    def end(self) -> bytes:
        """Give the usage chunk, if it was asked for, and the end mark."""
        if not self._job.include_usage:
            return DONE
        return self._head + b'],"usage":%s}\n\n' % _json(self._usage()) + DONE

    def error(self, error: ErrorBody) -> bytes:
        """Give the error event."""
        return b"data: %s\n\n" % encode_error(error)

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._exchange)

    def _closing(self) -> bytes:
        if self._job.continuous_usage:
            return b'}],"usage":%s}\n\n' % _json(self._usage())
        return self._tail

    def _new_ids(self, choice: Choice) -> bytes:
        """Give the field with the token ids that no chunk of a choice has had yet."""
        if not self._job.returns_ids:
            return b""
        begin, self._ids_said[choice.index] = self._ids_said[choice.index], len(choice.token_ids)
        return b',"token_ids":' + _json(choice.token_ids[begin:])

    def _new_prompt(self, choice: Choice) -> bytes:
        """Give the field with the ids of a choice's prompt, once they are known; once per choice."""
        if not self._job.returns_ids or not choice.prompt or choice.index in self._prompts_said:
            return b""
        self._prompts_said.add(choice.index)
        return b',"prompt_token_ids":' + _json(prompt_ids(choice))

    def _body(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        return _json(
            {
                "id": self._job.response_id,
                "object": self.object_whole,
                "created": self._created,
                "model": self._job.model,
                "system_fingerprint": self._fingerprint,
                "choices": choices,
                "usage": self._usage(),
                **more,
            }
        )


class ChatFormat(OpenAiFormat):
    """/v1/chat/completions. Where thoughts or calls may be in an answer, it is taken apart by `answers`."""

    object_stream = "chat.completion.chunk"
    object_whole = "chat.completion"

    def __init__(self, exchange: Exchange, fingerprint: str) -> None:
        super().__init__(exchange, fingerprint)
        outline = self._job.outline
        self._spoken = [SpokenChoice(outline, choice) for choice in exchange.choices] if outline else []
        self._is_plain = outline is None and not self._job.returns_ids and not self._job.continuous_usage

    def begin(self) -> bytes:
        """Give the role chunk of every choice."""
        role = b'"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null'
        return b"".join(head + role + self._closing() for head in self._heads)

    def delta(self, choice: Choice, text: str, logprobs: list[LogprobEntry], ended: Delta | None) -> bytes:
        """Give chunks of content, thoughts and calls and, at the end, a finish chunk of its own."""
        finish: str | None = ended.finish if ended is not None else None
        if self._is_plain and not logprobs:
            out = self._heads[choice.index] + b'"delta":{"content":' + _json(text) + b"}" + self._plain_tail
            out = out if text else b""
        else:
            deltas = [b'{"content":' + _json(text) + b"}"] if text else []
            if self._spoken:
                spoken = self._spoken[choice.index]
                deltas = spoken.deltas(text, final=ended is not None)
                finish = spoken.finish(finish)
            out = self._chunks(choice, deltas, logprobs)
        if ended is not None:
            out += self._heads[choice.index] + b'"delta":{},"logprobs":null,"finish_reason":%s%s' % (
                _json(finish), self._closing(),
            )  # fmt: skip
        return out

    def _chunks(self, choice: Choice, deltas: list[bytes], logprobs: list[LogprobEntry]) -> bytes:
        """Give a chunk per delta; what belongs to tokens goes with the first, or alone if no text is certain yet."""
        head, closing = self._heads[choice.index], self._closing()
        lists = encode_chat(logprobs) if logprobs else b"null"
        any_ids = self._job.returns_ids and self._ids_said[choice.index] < len(choice.token_ids)
        ids, prompt = self._new_ids(choice), self._new_prompt(choice)
        if not deltas and (logprobs or prompt or any_ids):
            deltas = [b'{"content":""}']
        out = []
        for delta in deltas:
            tail = closing if not prompt else b"}]" + prompt + closing[2:]
            out.append(head + b'"delta":%s,"logprobs":%s,"finish_reason":null%s%s' % (delta, lists, ids, tail))
            lists, ids, prompt = b"null", b"", b""
        return b"".join(out)

    def _usage(self) -> dict[str, Any]:
        """Count, with the tokens of thoughts where those are taken out and can be told exactly."""
        usage = super()._usage()
        if self._job.outline is not None and self._job.outline.thoughts is not None:
            counts = [spoken.thought_tokens for spoken in self._spoken]
            if None not in counts:
                usage["completion_tokens_details"] = {"reasoning_tokens": sum(filter(None, counts))}
        return usage

    def whole(self, logprobs: list[list[LogprobEntry]]) -> bytes:
        """Give the `chat.completion` object."""
        choices = []
        for choice in self._exchange.choices:
            lists = None
            if self._job.logprobs is not None:
                lists = {"content": chat_entries(logprobs[choice.index]), "refusal": None}
            assert choice.ended is not None, "only complete answers are written"
            message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
            finish: str | None = choice.ended.finish
            if self._spoken:
                message = self._spoken[choice.index].message()
                finish = self._spoken[choice.index].finish(finish)
            entry = {"index": choice.index, "message": message, "logprobs": lists, "finish_reason": finish}
            choices.append({**entry, "token_ids": choice.token_ids} if self._job.returns_ids else entry)
        more = {"prompt_token_ids": prompt_ids(self._exchange.choices[0])} if self._job.returns_ids else {}
        return self._body(choices, more)


class CompletionFormat(OpenAiFormat):
    """/v1/completions."""

    object_stream = object_whole = "text_completion"

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
        head, prompt = self._heads[choice.index], self._new_prompt(choice)
        return head + b'"text":%s,"logprobs":%s,"finish_reason":null%s%s' % (
            _json(text), lists, prompt, self._closing(),
        )  # fmt: skip

    def delta(self, choice: Choice, text: str, logprobs: list[LogprobEntry], ended: Delta | None) -> bytes:
        """Give a text chunk and, at the end, a finish chunk with an empty text."""
        head = self._heads[choice.index]
        out = self._echo(choice) if choice.index in self._unechoed else b""
        if logprobs or self._job.returns_ids:
            lists = _json(self._logprobs[choice.index].take(logprobs)) if logprobs else b"null"
            more = self._new_ids(choice) + self._new_prompt(choice)
            out += head + b'"text":%s,"logprobs":%s,"finish_reason":null%s%s' % (
                _json(text), lists, more, self._closing(),
            )  # fmt: skip
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
            entry: dict[str, Any] = {
                "index": choice.index,
                "text": echo + choice.text,
                "logprobs": lists,
                "finish_reason": choice.ended.finish,
            }
            if self._job.returns_ids:
                entry |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_ids(choice)}
            choices.append(entry)
        return self._body(choices, {})


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
