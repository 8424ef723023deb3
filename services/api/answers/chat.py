"""The parts of one chat choice as OpenAI writes them: deltas of a stream, and the message of a whole answer."""

from typing import Any

import msgspec

from services.api.answers.parser import AnswerParser, call_id, parse
from services.api.answers.text import Part
from services.api.exchange import Choice
from shared.dialect import Outline

_json = msgspec.json.encode


class SpokenChoice:
    """One choice whose text is taken apart."""

    def __init__(self, outline: Outline, choice: Choice) -> None:
        self._outline = outline
        self._parser = AnswerParser(outline)
        self._close_id = outline.thoughts.close_id if outline.thoughts else -1
        self._choice = choice
        self._num_calls = 0
        self._thought_tokens = -1

    def deltas(self, text: str, *, final: bool) -> list[bytes]:
        """Take text; give the `delta` objects of what is certain by now, with `final` of all that is left."""
        parts = self._parser.feed(text)
        if final:
            parts += self._parser.finish()
        return [self._delta(part) for part in _merged(parts)]

    def _delta(self, part: Part) -> bytes:
        kind, text = part
        if kind == "content":
            return b'{"content":%s}' % _json(text)
        if kind == "thought":
            return b'{"reasoning_content":%s}' % _json(text)
        if kind == "arguments":
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%s}}]}' % (self._num_calls - 1, _json(text))
        self._num_calls += 1
        number = self._num_calls - 1
        return b'{"tool_calls":[{"index":%d,"id":%s,"type":"function","function":{"name":%s,"arguments":""}}]}' % (
            number, _json(call_id(self._choice.uid, number)), _json(text),
        )  # fmt: skip

    def message(self) -> dict[str, Any]:
        """Give the message of the whole answer."""
        answer, self._parser = parse(self._outline, self._choice.text)
        self._num_calls = len(answer.calls)
        others = answer.calls or answer.thoughts
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if others and not answer.content else answer.content,
            "refusal": None,
        }
        if answer.thoughts:
            message["reasoning_content"] = answer.thoughts
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(self._choice.uid, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(answer.calls)
            ]
        return message

    def finish(self, reason: str | None) -> str | None:
        """Give the finish reason: an answer that stopped by itself and calls tools waits for their results."""
        return "tool_calls" if reason == "stop" and self._num_calls else reason

    @property
    def thought_tokens(self) -> int | None:
        """Count the tokens of the thoughts, their marks included; None where that cannot be said exactly."""
        parser, token_ids = self._parser, self._choice.token_ids
        if not parser.has_thought:
            return 0
        if parser.is_thinking:
            return len(token_ids)
        if self._thought_tokens < 0 and self._close_id in token_ids:
            self._thought_tokens = token_ids.index(self._close_id) + 1
        return None if self._thought_tokens < 0 else self._thought_tokens


def _merged(parts: list[Part]) -> list[Part]:
    """Join neighbours of one kind."""
    merged: list[Part] = []
    for kind, text in parts:
        if merged and merged[-1][0] == kind and kind != "call":
            merged[-1] = (kind, merged[-1][1] + text)
        else:
            merged.append((kind, text))
    return merged
