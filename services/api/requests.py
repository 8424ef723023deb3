"""The wire messages of a job: what is queued for a tokenizer, and the headers of its reply logs."""

import time
from collections.abc import Sequence

from services.api.exchange import Choice, Exchange
from services.api.job import Job
from shared.broker.log_id import NO_LOG, LogId, split_log_id
from shared.broker.streams import Choice as OpenChoice
from shared.messages import ReplyHeader, Said, TokenizeRequest


def make_request(job: Job, choices: Sequence[Choice]) -> TokenizeRequest:
    """Write the request for all choices of a job, or for one of them (a log that is opened again)."""
    if len(choices) == job.num_choices:
        prompts, n = job.prompts, job.n
    else:
        prompts, n = [job.prompts[choice.index // job.n] for choice in choices], 1
    return TokenizeRequest(
        uids=[choice.uid for choice in choices],
        prompts=prompts,
        n=n,
        seeds=[job.seed_of(choice.index) for choice in choices],
        params=job.params,
        model=job.model,
        request_id=job.request_id,
        tenant=job.tenant,
        priority=job.priority,
        arrival_ms=job.arrival_ms or time.time_ns() // 1_000_000,
        tools=job.tools,
        template_kwargs=job.template_kwargs,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        cache_salt=job.cache_salt,
        traceparent=job.traceparent,
        purpose=job.purpose,
        add_special=job.add_special,
        default_limit=job.default_limit,
    )


def make_header(job: Job, choice: Choice, replica: str) -> ReplyHeader:
    """Write the head of a choice's reply log."""
    return ReplyHeader(
        replica=replica,
        stop=job.stop,
        include_stop=job.include_stop,
        skip_special=job.skip_special,
        key_hash=job.key_hash,
        resumable_ms=job.resume_ms,
        request_id=job.request_id,
        index=choice.index,
        outline=job.outline,
        traceparent=job.traceparent,
    )


def make_choices(exchange: Exchange, replica: str) -> list[OpenChoice]:
    """Name the new logs of a request."""
    return [OpenChoice(c.uid, make_header(exchange.job, c, replica)) for c in exchange.choices]


def make_repair(choice: Choice, replica: str, expect: LogId) -> OpenChoice:
    """Name a log that is opened again, over one that ends at `expect`, with what its client was told."""
    job = choice.exchange.job
    said = Said(choice.token_ids, choice.text) if choice.said else None
    if said is not None and job.resume_ms:
        more = (choice.logprobs, choice.prompt_tokens, choice.cached_tokens, choice.prompt)
        said = Said(choice.token_ids, choice.text, *more)
    header = make_header(job, choice, replica)
    seen = max(choice.attempt, split_log_id(LogId(choice.last_id))[0])
    return OpenChoice(choice.uid, header, expect or NO_LOG, seen, said)
