"""What callers of the offline API ask for: prompts, conversations and parameters, each checked and named if it is bad.

Owns what the api checks for its clients. Knows no model: whether a prompt fits one is the tokenizer's to say.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, TypeAlias, get_type_hints

import msgspec

from shared import sampling
from shared.errors import InvalidRequest
from shared.messages import Prompt

Messages: TypeAlias = Sequence[Mapping[str, Any]]
OnePrompt: TypeAlias = str | Sequence[int]
OneConversation: TypeAlias = str | Messages

MAX_STOP: Final = 16


class SamplingParams(sampling.SamplingParams, kw_only=True, array_like=True, frozen=True):
    """How answers are drawn: the parameters of the wire, and those that the other services look after.

    Attributes:
        max_tokens: of an answer, 16 unless told otherwise; None is all that the context leaves.
        seed: None takes a new one for each answer.
        stop: a text that ends the answer, or up to 16.
        include_stop: the text that ended the answer is part of it.
        skip_special: control tokens print nothing.
    """

    max_tokens: int | None = 16
    seed: int | None = None  # type: ignore[assignment]
    stop: str | Sequence[str] = ()
    include_stop: bool = False
    skip_special: bool = True

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


_KINDS: Final = get_type_hints(SamplingParams)
_PROMPTS: Final = ("prompts", "token ids")
_CONVERSATIONS: Final = ("conversations", "messages")
_LEAST: Final = {"max_tokens": 1, "min_tokens": 0, "top_k": -1}


def read_prompts(prompts: OnePrompt | Sequence[OnePrompt]) -> list[Prompt]:
    """Take one prompt or several, each a text or token ids.

    Raises:
        InvalidRequest: one is neither.
    """
    several = [prompts] if isinstance(prompts, str) else _items(prompts, *_PROMPTS)
    return [_prompt(each) for each in ([several] if several and isinstance(several[0], Integral) else several)]


def read_conversations(conversations: OneConversation | Sequence[OneConversation]) -> list[Prompt]:
    """Take one conversation or several, each a list of messages, or the text of a user's only message.

    Raises:
        InvalidRequest: one is neither.
    """
    several = [conversations] if isinstance(conversations, str) else _items(conversations, *_CONVERSATIONS)
    return [_conversation(each) for each in ([several] if several and isinstance(several[0], Mapping) else several)]


def per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Give each of `count` prompts its parameters.

    Raises:
        InvalidRequest: they are not as many, or one has a bad value.
    """
    each: list[Any] = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * count
    if not all(isinstance(one, SamplingParams) for one in each):
        raise InvalidRequest("params: must be SamplingParams, or one for each prompt", param="params")
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts cannot use {len(each)} sets of parameters", param="params")
    for one in {id(one): one for one in each}.values():
        _check_kinds(one)
        _check(one)
    return each


def _items(given: object, param: str, what: str, kind: type = object) -> list[Any]:
    """Give what a list holds, which are all of one kind."""
    items = None if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable) else list(given)
    if items is None or not all(isinstance(item, kind) for item in items):
        raise InvalidRequest(f"{param}: each must be a text or a list of {what}", param=param)
    return items


def _prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    return Prompt(token_ids=[int(token_id) for token_id in _items(prompt, *_PROMPTS, Integral)])


def _conversation(conversation: object) -> Prompt:
    if isinstance(conversation, str):
        return Prompt(messages=[{"role": "user", "content": conversation}])
    return Prompt(messages=[dict(message) for message in _items(conversation, *_CONVERSATIONS, Mapping)])


def _check_kinds(params: SamplingParams) -> None:
    for name, kind in _KINDS.items():
        try:
            msgspec.convert(getattr(params, name), kind)
        except msgspec.ValidationError as e:
            raise InvalidRequest(f"{name}: {e}", param=name) from e


def _check(params: SamplingParams) -> None:
    """Refuse what the api would refuse."""
    for name, (low, high) in sampling.BOUNDS.items():
        value = getattr(params, name)
        for number in value.values() if isinstance(value, dict) else (value,):
            if not low <= number <= high:
                raise InvalidRequest(f"{name} is {number}; from {low} to {high} is allowed", param=name)
    for name, least in _LEAST.items():
        number = getattr(params, name)
        if number is not None and number < least:
            raise InvalidRequest(f"{name} is {number}; at least {least} is needed", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is not None and not 0 <= number <= sampling.MAX_LOGPROBS:
            raise InvalidRequest(f"{name} is {number}; from 0 to {sampling.MAX_LOGPROBS} is allowed", param=name)
    if len(params.stops) > MAX_STOP:
        raise InvalidRequest(f"stop has more than {MAX_STOP} texts", param="stop")
