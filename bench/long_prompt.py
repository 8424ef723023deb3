"""What a long prompt does to streams that run: the longest gaps between their tokens, without it and beside it.

Needs a served model: `python -m services.launcher` and then `python bench/long_prompt.py http://127.0.0.1:8000`.
Prints the p50, p99 and longest gap of the running streams, and the time to the first token of the long prompt alone
and beside them. Streams become slower as they grow, so they are watched without the prompt before, between and after
its turns. A gap counts from one arrival of tokens to the next, as a client sees it; answers come with their ids,
because not every token has a text of its own.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Final

import httpx

_WHOLE: Final = {"ignore_eos": True, "return_token_ids": True}
"""Streams go on until their time is over."""


@dataclass
class Stream:
    """Arrivals of one stream's text, on this process's clock."""

    arrivals: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps(self, since: float, until: float) -> list[float]:
        """Gaps that end between two moments."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [after - before for before, after in pairs if since <= after <= until]


async def read(client: httpx.AsyncClient, body: dict[str, object], stream: Stream) -> None:
    """Read one stream to its end."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                stream.arrivals.append(time.perf_counter())
                stream.begun.set()


def prompt_of(num_tokens: int) -> str:
    """About so many tokens that no cache has seen."""
    words = ["one", "two", "red", "blue", "tree", "house", "water", "stone"]
    return " ".join(random.choice(words) for _ in range(num_tokens))


async def first_token(client: httpx.AsyncClient, model: str, num_tokens: int) -> float:
    """Seconds to the first token of a new prompt."""
    stream, began = Stream(), time.perf_counter()
    await read(client, {"model": model, "prompt": prompt_of(num_tokens), "max_tokens": 1, **_WHOLE}, stream)
    return stream.arrivals[0] - began


def percentile(values: list[float], share: float) -> float:
    """A percentile in milliseconds."""
    ordered = sorted(values)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(name: str, gaps: list[float]) -> None:
    """Print the gaps of one phase."""
    print(
        f"{name:<22} p50 {percentile(gaps, 0.5):7.1f} ms   p99 {percentile(gaps, 0.99):7.1f} ms   "
        f"longest {1e3 * max(gaps):7.1f} ms   ({len(gaps)} gaps)"
    )


async def measure(args: argparse.Namespace) -> None:
    """Run the phases in turn on the same streams."""
    async with httpx.AsyncClient(base_url=args.url, timeout=600.0, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for _ in range(args.warm_up):
            await first_token(client, model, args.tokens // 4)
        alone = min([await first_token(client, model, args.tokens) for _ in range(args.rounds)])
        body = {"model": model, "max_tokens": args.length, "temperature": 0, **_WHOLE}
        streams = [Stream() for _ in range(args.streams)]
        tasks = [
            asyncio.create_task(read(client, {**body, "prompt": f"Number {i}: " + prompt_of(30)}, stream))
            for i, stream in enumerate(streams)
        ]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        without, beside, under = [], [], []
        for turn in range(args.rounds + 1):
            await asyncio.sleep(0.5)
            quiet = time.perf_counter()
            await asyncio.sleep(args.quiet)
            loud = time.perf_counter()
            without += [gap for stream in streams for gap in stream.gaps(quiet, loud)]
            if turn < args.rounds:
                under.append(await first_token(client, model, args.tokens))
                beside += [gap for stream in streams for gap in stream.gaps(loud, time.perf_counter())]
            assert not any(task.done() for task in tasks), "the streams are too short: raise --length"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    show("without", without)
    show("beside a long prompt", beside)
    ratio = percentile(beside, 0.99) / percentile(without, 0.99)
    print(f"p99 of the gaps: {ratio:.2f} times")
    slowdown = min(under) / alone
    print(f"first token of {args.tokens} tokens: {alone:.2f} s alone, {min(under):.2f} s beside: {slowdown:.2f} times")


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=6000, help="of the long prompt, about")
    parser.add_argument("--length", type=int, default=3000, help="tokens of each stream at most")
    parser.add_argument(
        "--quiet", type=float, default=3.0, help="seconds without the long prompt, before, between and after"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=2, help="shorter prompts before anything is measured")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
