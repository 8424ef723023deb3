"""How fast a server is for many at once: tokens per second, time to the first token, time between tokens."""

import argparse
import asyncio
import os
import statistics
import time

from openai import AsyncOpenAI

PROMPT = "Tell me a long story about a river, a mill and the people who live there."


async def ask(client: AsyncOpenAI, model: str, max_tokens: int, waits: list[float], gaps: list[float]) -> int:
    """Read one stream to its end; give its tokens."""
    last = time.perf_counter()
    num_tokens, times = 0, waits
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},  # all answers equally long
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            now = time.perf_counter()
            times.append(now - last)
            last, times = now, gaps
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return num_tokens


async def main(args: argparse.Namespace) -> None:
    """Keep `streams` requests running until `requests` are done."""
    client = AsyncOpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
    )
    model = (await client.models.list()).data[0].id
    waits: list[float] = []
    gaps: list[float] = []
    places = asyncio.Semaphore(args.streams)

    async def one() -> int:
        async with places:
            return await ask(client, model, args.max_tokens, waits, gaps)

    began = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(args.requests)))
    seconds = time.perf_counter() - began
    print(f"{args.requests} requests, {args.streams} at a time, {sum(counts)} tokens in {seconds:.1f} s")
    print(f"{sum(counts) / seconds:.1f} tokens/s")
    for name, times in (("first token", waits), ("between tokens", gaps)):
        if not times:  # answers of one token have nothing between
            continue
        cuts = statistics.quantiles(times * 2 if len(times) == 1 else times, n=100)
        print(f"{name}: p50 {1000 * cuts[49]:.1f} ms, p99 {1000 * cuts[98]:.1f} ms")


def positive(text: str) -> int:
    """Read a number of which there must be one at least."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1 is needed")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=positive, default=8, help="requests at a time")
    parser.add_argument("--requests", type=positive, default=32, help="requests in all")
    parser.add_argument("--max-tokens", type=positive, default=64, help="tokens of each answer")
    asyncio.run(main(parser.parse_args()))
