"""From requests to token ids: renders, encodes and checks lengths. It knows nothing of the broker.

A request is refused whole: one bad prompt of several fails all of its choices. One that only asks for the ids of a
text, or the text of ids, has its answer here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.control_texts import ControlTexts
from shared.errors import ContextLengthExceeded, InvalidRequest, RequestError, ServerFault
from shared.messages import Delta, GenerateRequest, LogprobEntry, Prompt, TokenizeRequest
from shared.sampling import SamplingParams
from shared.vocab import Vocabulary

HEAVY_CHARS: Final = 100_000
"""Requests of more text than this are encoded aside, so that short ones need not wait for them."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request whose prompts are ids: one GenerateRequest per uid, in the order of its uids."""

    requests: list[GenerateRequest]
    num_prompts: int

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all choices' prompts."""
        return sum(len(request.prompt_ids) for request in self.requests)


def weigh(request: TokenizeRequest) -> int:
    """Estimate the characters of text in a request, without rendering it."""
    texts = sum(len(p.text or "") + sum(_chars(m.get("content")) for m in p.messages or ()) for p in request.prompts)
    return texts + (sum(len(p.token_ids or ()) for p in request.prompts) if request.purpose == "detokenize" else 0)


def _chars(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(_chars(part.get("text")) for part in content) if isinstance(content, list) else 0


class PromptEncoder:
    """Encodes requests for one model. It holds no state between calls, so threads may share it.

    Args:
        vocabulary: of the model.
        template: of the model.
        controls_in_messages: control tokens that a message spells become tokens, as those of a plain prompt do.
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate, *, controls_in_messages: bool = False) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._controls = None if controls_in_messages else ControlTexts(vocabulary)

    def encode(self, requests: Sequence[TokenizeRequest], max_seq_len: int) -> list[Encoded | Delta | RequestError]:
        """Encode several requests in one batch; each gets its ids, its whole answer, or the reason why not.

        Args:
            requests: together not much heavier than HEAVY_CHARS, if the caller is in a hurry.
            max_seq_len: tokens of prompt and answer together.
        """
        read = [self._read(request, max_seq_len) for request in requests]
        prompts = [prompt for answer in read if not isinstance(answer, RequestError) for prompt in answer]
        texts = self._vocabulary.encode_batch([prompt for prompt in prompts if isinstance(prompt, str)])
        encoded = iter(texts)
        return [
            answer
            if isinstance(answer, RequestError)
            else self._finish(request, [next(encoded) if isinstance(p, str) else p for p in answer], max_seq_len)
            for request, answer in zip(requests, read, strict=True)
        ]

    def _read(self, request: TokenizeRequest, max_seq_len: int) -> list[str | list[int]] | RequestError:
        try:
            if len(request.uids) != len(request.prompts) * request.n or len(request.seeds) != len(request.uids):
                raise ServerFault("the request's choices do not fit its prompts")
            self._check_ids(request.params.logit_bias, "logit_bias")
            self._check_ids(request.params.stop_token_ids, "stop_token_ids")
            return [self._prompt(request, prompt, max_seq_len) for prompt in request.prompts]
        except RequestError as e:
            return e

    def _prompt(self, request: TokenizeRequest, prompt: Prompt, max_seq_len: int) -> str | list[int]:
        """Give a prompt's ids where they came as ids: those are taken as they are. Else its text."""
        if prompt.token_ids is not None:
            if not prompt.token_ids and request.purpose == "generate":
                raise InvalidRequest("a prompt of token ids must not be empty", param="prompt")
            self._check_ids(prompt.token_ids, "prompt" if request.purpose == "generate" else "tokens")
            return prompt.token_ids
        pieces, param = [prompt.text or ""], "prompt"
        if prompt.messages is not None:
            param = "messages"
            rendered = self._template.render(
                prompt.messages,
                tools=request.tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                kwargs=request.template_kwargs,
                controls=self._controls,
            )
            pieces = [rendered] if self._controls is None else self._controls.pieces(rendered)
        text = "".join(pieces)
        if request.purpose == "generate" and self._vocabulary.is_too_long(text, max_seq_len):
            raise ContextLengthExceeded(_too_long(max_seq_len, f"more than {max_seq_len}"), param=param)
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InvalidRequest("the text holds half a character (a lone surrogate)", param=param) from e
        if request.add_special and len(pieces) == 1:
            return text
        first, *rest = pieces
        ids = self._vocabulary.encode(first, add_special=request.add_special)
        return [*ids, *chain.from_iterable(self._vocabulary.encode_batch(rest, add_special=False))]

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        for token_id in ids:
            if self._vocabulary.token_bytes(token_id) is None:
                raise InvalidRequest(f"token id {token_id} is not in the model's vocabulary", param=param)

    def _finish(
        self, request: TokenizeRequest, prompts: list[list[int]], max_seq_len: int
    ) -> Encoded | Delta | RequestError:
        if request.purpose != "generate":
            return self._tell(request, prompts[0])
        try:
            fitted = [self._fit(request, ids or list(self._vocabulary.empty_ids), max_seq_len) for ids in prompts]
        except RequestError as e:
            return e
        return Encoded(
            [
                GenerateRequest(
                    uid=uid,
                    prompt_ids=fitted[i // request.n][0],
                    params=msgspec.structs.replace(fitted[i // request.n][1], seed=seed),
                    request_id=request.request_id,
                    tenant=request.tenant,
                    priority=request.priority,
                    arrival_ms=request.arrival_ms,
                    cache_salt=request.cache_salt,
                    traceparent=request.traceparent,
                )
                for i, (uid, seed) in enumerate(zip(request.uids, request.seeds, strict=True))
            ],
            num_prompts=len(prompts),
        )

    def _tell(self, request: TokenizeRequest, ids: list[int]) -> Delta:
        """Make the whole answer of a request that no engine has to see."""
        if request.purpose == "detokenize":
            text = self._vocabulary.decode(ids, skip_special=False)
            return Delta(0, [], text, finish="stop", prompt_tokens=len(ids))
        tokens = [LogprobEntry(i, 0.0, self._vocabulary.token_bytes(i) or b"") for i in ids]
        return Delta(0, [], "", finish="stop", prompt_tokens=len(ids), prompt=tokens)

    def _fit(self, request: TokenizeRequest, ids: list[int], max_seq_len: int) -> tuple[list[int], SamplingParams]:
        """Check that prompt and answer have room; an answer without a limit of its own gets no more than is left."""
        param = "messages" if request.prompts[0].messages is not None else "prompt"
        if not ids:
            raise InvalidRequest("the prompt is empty, and the model has no token to start with", param=param)
        room = max_seq_len - len(ids)
        if room <= 0:
            raise ContextLengthExceeded(_too_long(max_seq_len, str(len(ids))), param=param)
        asked = request.params.max_tokens
        if asked is not None and request.default_limit:
            asked = min(asked, room)
        if asked is not None and asked > room:
            message = (
                f"This model's maximum context length is {max_seq_len} tokens. However, you requested "
                f"{len(ids) + asked} tokens ({len(ids)} in the {param}, {asked} in the completion). "
                f"Please reduce the length of the {param} or completion."
            )
            raise ContextLengthExceeded(message, param="max_tokens")
        max_tokens = room if asked is None else asked
        if request.params.min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens is above the {max_tokens} tokens that fit", param="min_tokens")
        return ids, msgspec.structs.replace(request.params, max_tokens=max_tokens)


def _too_long(max_seq_len: int, found: str) -> str:
    return (
        f"This model's maximum context length is {max_seq_len} tokens. However, your prompt resulted in "
        f"{found} tokens. Please reduce the length of the prompt."
    )
