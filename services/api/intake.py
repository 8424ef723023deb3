"""From a parsed body to a job: the rules that join fields, and the meaning of those left out.

Everything a client asks for is either in the job or refused here by name. Knows neither HTTP nor the broker;
what only the vocabulary or the context length can tell (a token id out of range, a prompt too long) is the
tokenizer's to refuse.
"""

import secrets
from typing import Any, Final

import msgspec

from services.api.job import Job
from services.api.prompts import read_message, read_prompts
from services.api.schema import (
    MAX_STOP,
    MAX_STOP_BYTES,
    MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Sampling,
    check_tree,
)
from services.api.structured import grammar_of, guide
from services.api.tools import make_outline, read_tools
from shared.dialect import Dialect, Thoughts
from shared.errors import InvalidRequest
from shared.messages import Prompt
from shared.sampling import BOUNDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

COMPLETION_MAX_TOKENS: Final = 16
"""OpenAI's default for completions; chat has none."""
GENERATE_MAX_TOKENS: Final = 128


def _unsupported(param: str, reason: str = "not supported by this server") -> InvalidRequest:
    return InvalidRequest.of_field(param, reason, "unsupported_parameter")


def chat_job(body: ChatRequest, max_depth: int, dialect: Dialect | None = None) -> Job:
    """Check a chat request.

    Args:
        body: the request.
        max_depth: of its free-form parts.
        dialect: how its model writes calls and thoughts; None while no tokenizer has said it.

    Raises:
        InvalidRequest: naming the field.
        Unavailable: it has tools, and the dialect is not known.
    """
    _refuse_what_is_not_there(body)
    if not body.messages:
        raise InvalidRequest.of_field("messages", "must hold at least one message")
    messages = [read_message(m, i, max_depth) for i, m in enumerate(body.messages)]
    continues = bool(body.continue_final_message)
    generation_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and generation_prompt:
        raise InvalidRequest.of_field("continue_final_message", "cannot be set together with add_generation_prompt")
    if continues and body.messages[-1].role != "assistant":
        raise InvalidRequest.of_field("continue_final_message", "the last message must be the assistant's")
    kwargs = _template_kwargs(body, max_depth)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest.of_field("top_logprobs", "needs logprobs to be true")
    max_tokens = _limit(body, None)
    if max_tokens == 0:
        raise InvalidRequest.of_field("max_tokens", "must be at least 1")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    thoughts = _thoughts(dialect, kwargs, messages[-1]["content"] if continues else None)
    offer = read_tools(body, dialect, thoughts, max_depth)
    job = _job("chat", body.model, [Prompt(messages=messages)], body, max_tokens, logprobs, max_depth)
    grammar = guide(job.params.grammar, offer, thoughts)
    job.params = msgspec.structs.replace(job.params, grammar=grammar)
    job.outline = make_outline(body, dialect, offer, thoughts)
    job.tools = offer.shown
    job.template_kwargs = kwargs
    job.add_generation_prompt, job.continue_final_message = generation_prompt, continues
    return job


def _refuse_what_is_not_there(body: ChatRequest) -> None:
    if body.modalities is not None and body.modalities != ["text"]:
        raise _unsupported("modalities", "only text is supported by this server")
    if body.functions is not None:
        raise _unsupported("functions", "not supported by this server; use tools")
    if body.function_call is not None:
        raise _unsupported("function_call", "not supported by this server; use tool_choice")
    if body.prediction is not None:
        raise _unsupported("prediction")
    if body.verbosity not in (None, "medium"):
        raise _unsupported("verbosity", "only medium is supported by this server")


def _template_kwargs(body: ChatRequest, max_depth: int) -> dict[str, Any]:
    """Give further variables for the chat template; no effort at all switches thinking off."""
    kwargs = body.chat_template_kwargs or {}
    check_tree(kwargs, "chat_template_kwargs", max_depth)
    if body.reasoning_effort is None:
        return kwargs
    off = {"enable_thinking": False, "thinking": False} if body.reasoning_effort == "none" else {}
    return {"reasoning_effort": body.reasoning_effort, **off, **kwargs}


def _thoughts(dialect: Dialect | None, kwargs: dict[str, Any], continued: str | None) -> Thoughts | None:
    """Give the thoughts to expect in an answer, by the template's switch or by the message that is continued."""
    if dialect is None or dialect.thoughts is None:
        return None
    if continued is not None:
        head, opened, tail = continued.rpartition(dialect.thoughts.open)
        is_open = bool(opened) and not head.strip() and dialect.thoughts.close not in tail
        return msgspec.structs.replace(dialect.thoughts, begun=True) if is_open else None
    switch = kwargs.get("enable_thinking", kwargs.get("thinking"))
    return dialect.thoughts_for(switch if isinstance(switch, bool) else None)


def completion_job(body: CompletionRequest, max_depth: int) -> Job:
    """Check a completions request.

    Raises:
        InvalidRequest: naming the field.
    """
    if body.suffix is not None:
        raise _unsupported("suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported("best_of", "only best_of equal to n is supported")
    prompts = read_prompts(body.prompt)
    max_tokens = _limit(body, COMPLETION_MAX_TOKENS)
    job = _job("completion", body.model, prompts, body, max_tokens, body.logprobs, max_depth)
    if body.echo:
        job.echo = [p.text for p in prompts]
        job.params = msgspec.structs.replace(
            job.params,
            prompt_logprobs=body.logprobs,
            returns_prompt=job.returns_ids or any(p.text is None for p in prompts),
        )
    return job


def generate_job(body: GenerateRequest, default_model: str, max_depth: int) -> Job:
    """Check a request of the plain interface; it streams unless told otherwise.

    Raises:
        InvalidRequest: naming the field.
    """
    if (body.n or 1) != 1:
        raise InvalidRequest.of_field("n", "must be 1 here")
    if body.stream_options is not None:
        raise _unsupported("stream_options", "not part of this interface")
    if body.return_token_ids:
        raise _unsupported("return_token_ids", "not part of this interface")
    prompts = read_prompts(body.prompt)
    if len(prompts) != 1:
        raise InvalidRequest.of_field("prompt", "must be one prompt here")
    if body.stream is None:
        body.stream = True
    max_tokens = _limit(body, GENERATE_MAX_TOKENS)
    return _job("generate", body.model or default_model, prompts, body, max_tokens, None, max_depth)


def _job(
    kind: Any,
    model: str,
    prompts: list[Prompt],
    body: Sampling,
    max_tokens: int | None,
    logprobs: int | None,
    max_depth: int,
) -> Job:
    if not model:
        raise InvalidRequest.of_field("model", "must not be empty")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest.of_field("stream_options", "is only allowed when stream is true")
    options = body.stream_options
    params = msgspec.structs.replace(
        _params(body, max_tokens, logprobs),
        grammar=grammar_of(body, max_depth),
        returns_prompt=bool(body.return_token_ids),
    )
    return Job(
        kind=kind,
        model=model,
        prompts=prompts,
        n=body.n or 1,
        params=params,
        seed=params.seed,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        stop=_stop(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        logprobs=logprobs,
        timeout_s=body.timeout,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        returns_ids=bool(body.return_token_ids),
        default_limit=body.max_tokens is None and body.max_completion_tokens is None,
    )


def _params(body: Sampling, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    stop_token_ids = body.stop_token_ids or []
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest.of_field("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} are allowed")
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest.of_field("min_tokens", "must not be larger than max_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=0 if body.top_k is None else body.top_k,
        min_p=_or(body.min_p, 0.0),
        seed=secrets.randbits(64) - 2**63 if body.seed is None else body.seed,
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias),
        logprobs=logprobs,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
    )


def _limit(body: Sampling, default: int | None) -> int | None:
    """Give the tokens to produce at most, under either of its names."""
    if body.max_completion_tokens is None:
        return default if body.max_tokens is None else body.max_tokens
    if body.max_tokens is not None:
        raise InvalidRequest.of_field("max_completion_tokens", "cannot be set together with max_tokens")
    return body.max_completion_tokens


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    if not given:
        return {}
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequest.of_field("logit_bias", f"at most {MAX_LOGIT_BIAS} entries are allowed")
    low, high = BOUNDS["logit_bias"]
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10) or int(key) > MAX_TOKENS:
            raise InvalidRequest.of_field("logit_bias", "every key must be a token id")
        if not low <= value <= high:
            raise InvalidRequest.of_field("logit_bias", f"every value must lie between {low:g} and {high:g}")
        bias[int(key)] = value
    return bias


def _stop(given: str | list[str] | None) -> list[str]:
    """Give the stop strings; empty ones match nothing and are left out."""
    if given is None:
        return []
    listed = [given] if isinstance(given, str) else given
    if len(listed) > MAX_STOP:
        raise InvalidRequest.of_field("stop", f"at most {MAX_STOP} stop strings are allowed")
    if any(len(s.encode()) > MAX_STOP_BYTES for s in listed):
        raise InvalidRequest.of_field("stop", f"a stop string is longer than {MAX_STOP_BYTES} bytes")
    return [s for s in listed if s]
