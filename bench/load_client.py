"""A closed loop of streaming clients in processes of their own: so many requests under way, each read to its end.

What it reports is what a client sees: tokens per second, the time to the first event with text, the gaps between
events. Answers must have the length that was asked for (`ignore_eos`), so tokens need not be counted one by one.
"""

import asyncio
import json
import multiprocessing
import random
import time
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from typing import Any, Final

import aiohttp

ANSWER_S: Final = 300.0
_START_S: Final = 3.0
"""Processes begin together, this long after they were asked for."""
_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
WORDS: Final = tuple(_TEXT.split())
"""Of prompts; a token each for most tokenizers."""


@dataclass(slots=True)
class Seen:
    """What clients saw.

    Attributes:
        tokens: of complete answers.
        first_s: per answer, from asking to its first event.
        gaps_s: between events of one answer.
        errors: of answers that were not complete.
        ended: when the last answer was there, on the clock of `time.time`.
    """

    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ended: float = 0.0


def percentile_ms(values: list[float], share: float) -> float:
    """A percentile of seconds, in milliseconds."""
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2) if ordered else float("nan")


def run_load(
    url: str, model: str, lengths: list[tuple[int, int]], streams: int, *, processes: int = 8, seed: int = 0
) -> dict[str, Any]:
    """Ask for all answers, so many at a time, and tell how it went.

    Args:
        url: of the api, with `/v1`.
        model: served there.
        lengths: words of the prompt and tokens of the answer of each request.
        streams: requests under way.
        processes: to spread them over.
        seed: of the prompts; another one shares no prompt.
    """
    processes = min(processes, streams)
    context = multiprocessing.get_context("spawn")
    found: Queue[Seen] = context.Queue()
    start = time.time() + _START_S
    workers = []
    for i in range(processes):
        own = streams // processes + (i < streams % processes)
        args = (url, model, lengths[i::processes], own, 1000 * seed + i, start, found)
        workers.append(context.Process(target=_work, args=args))
        workers[-1].start()
    parts = [found.get() for _ in workers]
    for worker in workers:
        worker.join()
    first, gaps = ([value for part in parts for value in getattr(part, name)] for name in ("first_s", "gaps_s"))
    seconds = max(part.ended for part in parts) - start
    return {
        "streams": streams,
        "answers": len(first),
        "errors": sorted({error for part in parts for error in part.errors})[:3],
        "seconds": round(seconds, 2),
        "tok_per_s": round(sum(part.tokens for part in parts) / seconds, 1),
        "first_ms": {"p50": percentile_ms(first, 0.5), "p99": percentile_ms(first, 0.99)},
        "gap_ms": {"p50": percentile_ms(gaps, 0.5), "p99": percentile_ms(gaps, 0.99)},
        "events": len(first) + len(gaps),
    }


def _work(
    url: str, model: str, lengths: list[tuple[int, int]], streams: int, seed: int, start: float, found: "Queue[Seen]"
) -> None:
    found.put(asyncio.run(_run(url, model, lengths, streams, seed, start)))


async def _run(url: str, model: str, lengths: list[tuple[int, int]], streams: int, seed: int, start: float) -> Seen:
    rng, seen, waiting = random.Random(seed), Seen(), iter(lengths)
    requests = ((" ".join(rng.choices(WORDS, k=prompt)), answer) for prompt, answer in waiting)

    async def stream(session: aiohttp.ClientSession) -> None:
        for prompt, answer in requests:
            try:
                await _ask(session, url, model, prompt, answer, seen)
            except (aiohttp.ClientError, TimeoutError, ValueError) as e:
                seen.errors.append(repr(e)[:200])

    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as session:
        await asyncio.sleep(start - time.time())
        await asyncio.gather(*(stream(session) for _ in range(streams)))
    seen.ended = time.time()
    return seen


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: str, tokens: int, seen: Seen) -> None:
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0.6, "ignore_eos": True,
    }  # fmt: skip
    began = last = time.perf_counter()
    first, reason = None, ""
    async with session.post(f"{url}/completions", json=body) as answer:
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            if first is None:
                first = now - began
            else:
                seen.gaps_s.append(now - last)
            last = now
            if b'"finish_reason":"' in line:
                reason = json.loads(line[6:])["choices"][0]["finish_reason"]
    if reason != "length" or first is None:
        raise ValueError(f"an answer ended with {reason!r}")
    seen.first_s.append(first)
    seen.tokens += tokens
