"""Log probabilities in OpenAI's two forms. Values that JSON cannot hold become OpenAI's own -9999.0."""

import codecs
import math
from typing import Any, Final

import msgspec

from shared.messages import LogprobEntry

VERY_UNLIKELY: Final = -9999.0


def _finite(value: float) -> float:
    return min(value, 0.0) if math.isfinite(value) else VERY_UNLIKELY


def chat_entries(entries: list[LogprobEntry]) -> list[dict[str, Any]]:
    """Give the chat form: one object per token, with its bytes and the alternatives asked for."""
    return [
        {
            "token": entry.token.decode(errors="replace"),
            "logprob": _finite(entry.logprob),
            "bytes": list(entry.token),
            "top_logprobs": [
                {"token": token.decode(errors="replace"), "logprob": _finite(value), "bytes": list(token)}
                for _, value, token in entry.top
            ],
        }
        for entry in entries
    ]


def encode_chat(entries: list[LogprobEntry]) -> bytes:
    """Write the `logprobs` field of a chat choice."""
    return msgspec.json.encode({"content": chat_entries(entries), "refusal": None})


def _name(token: bytes) -> str:
    """Name a token as completions do: its text, or its bytes where they are no text by themselves."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def decode_prompt(prompt: list[LogprobEntry]) -> str:
    """Give the text of a prompt that came as ids."""
    return b"".join(entry.token for entry in prompt).decode(errors="replace")


class CompletionLogprobs:
    """The completions form of one choice: parallel lists, with each token's offset in its text, echo included."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def take_prompt(self, prompt: list[LogprobEntry], text: str) -> dict[str, list[Any]]:
        """Give the lists of an echoed prompt, in front of all others; its first token has no log probability.

        Tokens that the prompt was given in addition (a begin of text) stand in front of it and have no width.
        """
        lists = self.take(prompt)
        if prompt:
            lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        added = max(0, self._offset - len(text))
        lists["text_offset"] = [max(0, offset - added) for offset in lists["text_offset"]]
        self._decoder.reset()
        self._offset = len(text)
        return lists

    def take(self, entries: list[LogprobEntry]) -> dict[str, list[Any]]:
        """Give the lists for the next tokens of the choice, in order."""
        tokens, values, tops, offsets = [], [], [], []
        for entry in entries:
            name = _name(entry.token)
            tokens.append(name)
            values.append(_finite(entry.logprob))
            top = {_name(token): _finite(value) for _, value, token in entry.top}
            top.setdefault(name, values[-1])
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.token))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
