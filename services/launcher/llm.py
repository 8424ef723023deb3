"""The offline API: a model in this process, without a broker and without services.

    from services.launcher.llm import LLM, SamplingParams

    llm = LLM("Qwen/Qwen3-0.6B", dtype="bfloat16")
    for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16, temperature=0.0)):
        print(answer.text)

Scheduler, step loop and engine are those of the scheduler service; prompts are encoded by the tokenizer's code and
answers printed by the detokenizer's, so the text is that of a served request with the same parameters.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from tqdm import tqdm

from services.detokenizer.state import Texts
from services.launcher.asked import (
    OneConversation,
    OnePrompt,
    SamplingParams,
    per_prompt,
    read_conversations,
    read_prompts,
)
from services.launcher.hints import renamed
from services.launcher.offline import Answer, OfflineLink
from services.scheduler import service
from services.scheduler.core.batch import PositionLogprobs, RowLogprobs
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.ports import EngineLimits
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.loop import StepLoop
from services.scheduler.settings import SchedulerSettings
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.encode import Encoded, PromptEncoder
from shared import sampling
from shared.errors import ConfigError, InvalidRequest, MillraceError, RequestError
from shared.ids import new_uid
from shared.messages import ErrorBody, FinishReason, GenerateRequest, Prompt, ReplyHeader, TokenizeRequest
from shared.settings import ENV_PREFIX, load
from shared.vocab import load_vocabulary

__all__ = ["LLM", "Generation", "SamplingParams", "Usage"]

_ENCODE_AT_ONCE: Final = 256
_WIRE_FIELDS: Final = frozenset(sampling.SamplingParams.__struct_fields__)
_ALIASES: Final = {"tp": "tensor_parallel_size"}


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took. `cached_tokens` of the prompt were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer.

    Attributes:
        prompt_ids: the prompt as the model saw it.
        text: without the stop string and without the end token.
        token_ids: all that were drawn, the end token included.
        finish_reason: "stop" or "length"; None when it failed.
        error: why it failed, or None.
        logprobs: one per token, if they were asked for.
        prompt_logprobs: pieces that together have a place for every token of the prompt but the first, if asked for.
    """

    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    usage: Usage
    error: ErrorBody | None = None
    logprobs: list[RowLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None


class LLM:
    """A model, ready to answer. It holds the device until `close`; use it from one thread at a time."""

    def __init__(self, model: str = "", **flags: Any) -> None:
        """Load the model.

        Args:
            model: folder, hub id, GGUF file; empty is the embedded default.
            flags: the settings of a scheduler by their names (`dtype`, `num_pages`, `max_running_requests`, ...);
                `tp` is short for `tensor_parallel_size`. They are stronger than `MILLRACE_` variables.

        Raises:
            ConfigError: the model cannot be served as asked, or a flag is not known; a bad flag is called by its name
                here, and a bad variable by its own.
        """
        names = {f"{ENV_PREFIX}{_ALIASES.get(name, name).upper()}": name for name in ("model", *flags)}
        flags = {_ALIASES.get(name, name): value for name, value in flags.items()}
        if unknown := sorted(flags.keys() - SchedulerSettings.model_fields.keys()):
            raise ConfigError(f"{unknown[0]}: no setting of a scheduler has this name")
        try:
            settings = load(SchedulerSettings, {"model": model, **flags})
            files = service.find_files(settings)
            self._engine = service.build(settings)
        except ConfigError as e:
            raise ConfigError(renamed(str(e), names)) from e
        self._is_closed = False
        limits = self._engine.limits
        vocabulary = load_vocabulary(files)
        self._encoder = PromptEncoder(vocabulary, ChatTemplate(files))
        self._texts = Texts(vocabulary)
        self._grammars = service.make_compiler(settings, limits)
        # Nobody waits for the next token, so prompts take all the room of a step.
        budget = settings.max_prefill_tokens or limits.max_step_tokens
        config = SchedulerConfig(settings.cache, budget, max_gap_ratio=0.0)
        self._scheduler = Scheduler(limits, config, self._grammars)
        self._link = OfflineLink(self._texts)
        self._loop = StepLoop(self._engine, self._link, self._scheduler, overlap=not settings.disable_overlap)

    @property
    def limits(self) -> EngineLimits:
        """What the engine can hold."""
        return self._engine.limits

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Answer prompts.

        Args:
            prompts: one or several; a text, or token ids that are taken as they are.
            params: for all, or one for each; without them answers have 16 tokens at most.
            progress: show a bar; None shows it on a terminal.

        Returns:
            One answer per prompt, in their order.

        Raises:
            InvalidRequest: a prompt or a parameter is not valid; nothing was computed.
        """
        return self._answer(read_prompts(prompts), params, progress)

    def chat(
        self,
        conversations: OneConversation | Sequence[OneConversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Answer conversations, which the model's chat template makes prompts of. Otherwise as `generate`.

        Args:
            conversations: one or several; a list of messages, or a text, which is one message of a user.
            params: see `generate`.
            progress: see `generate`.
        """
        return self._answer(read_conversations(conversations), params, progress)

    def close(self) -> None:
        """Give the device back."""
        self._is_closed = True
        self._engine.close()
        self._grammars.close()

    def __enter__(self) -> Self:
        """Use it in a `with` statement."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _answer(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, progress: bool | None
    ) -> list[Generation]:
        if self._is_closed:
            raise MillraceError("this model is closed")
        each = per_prompt(params, len(prompts))
        answers = self._prepare(prompts, each)
        # Long ones first: what is left at the end is then short, and steps stay full.
        order = sorted(answers, key=lambda answer: -(answer.request.params.max_tokens or 0))
        disable = None if progress is None else not progress
        with _Bar(total=len(answers), desc="answers", unit="answer", disable=disable) as bar:
            self._run(order, bar)
        return [_generation(answer, asked) for answer, asked in zip(answers, each, strict=True)]

    def _prepare(self, prompts: list[Prompt], params: Sequence[SamplingParams]) -> list[Answer]:
        """Encode and check everything before anything is computed."""
        asked = [_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        requests: list[GenerateRequest] = []
        for first in range(0, len(asked), _ENCODE_AT_ONCE):
            batch = asked[first : first + _ENCODE_AT_ONCE]
            for number, found in enumerate(self._encoder.encode(batch, self.limits.max_seq_len), start=first):
                if isinstance(found, RequestError):
                    raise InvalidRequest(f"prompt {number}: {found.message}", param=found.param) from found
                assert isinstance(found, Encoded), "it was to be generated"
                requests += found.requests
        return [Answer(request, _header(each)) for request, each in zip(requests, params, strict=True)]

    def _run(self, answers: Sequence[Answer], bar: "_Bar") -> None:
        num_tokens = 0

        def count(tokens: int, ended: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            if ended:
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                bar.update(ended)

        link = self._link
        link.watch(count)
        link.add(answers)
        try:
            while link.num_running:
                self._loop.turn()
        finally:
            # Also after an interrupt nothing may be left in a slot, or in flight.
            link.drop_all()
            self._loop.settle_all()


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread that watches the bar: it would outlive the call


def _request(prompt: Prompt, params: SamplingParams) -> TokenizeRequest:
    fields = {name: value for name, value in msgspec.structs.asdict(params).items() if name in _WIRE_FIELDS}
    seed = secrets.randbits(62) if params.seed is None else params.seed
    wire = sampling.SamplingParams(**(fields | {"seed": seed}))
    return TokenizeRequest([new_uid()], [prompt], 1, [seed], wire, "")


def _header(params: SamplingParams) -> ReplyHeader:
    return ReplyHeader("", params.stops, params.include_stop, params.skip_special)


def _generation(answer: Answer, params: SamplingParams) -> Generation:
    usage = Usage(len(answer.request.prompt_ids), len(answer.token_ids), answer.cached_tokens)
    return Generation(
        prompt_ids=answer.request.prompt_ids,
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish,
        usage=usage,
        error=answer.error,
        logprobs=None if params.logprobs is None else answer.logprobs,
        prompt_logprobs=list(answer.prompt.scores) if answer.prompt is not None else None,
    )
