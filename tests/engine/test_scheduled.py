"""Scheduler and CPU engine against transformers: pages, chunks, prefixes, retraction, overlap change nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.ports import Engine
from services.scheduler.engine.engine import build_engine
from shared.model_files import locate
from tests.engine.driver import TINY
from tests.engine.scheduled import Scheduled
from tests.fakes.link import arrival

TOKENS = 40
RNG = np.random.default_rng(5)
SHARED = RNG.integers(3, 300, 40).tolist()
PROMPTS = [[*SHARED[:keep], *RNG.integers(3, 300, own).tolist()] for keep, own in
           ((0, 1), (0, 15), (0, 16), (0, 17), (40, 1), (40, 9), (33, 20), (40, 1))]  # fmt: skip
BANS = {2: -100.0}


def run(engine: Engine, config: SchedulerConfig, depth: int) -> Scheduled:
    """All prompts at once, then again, so that every prefix is cached."""
    both = Scheduled(engine, config, depth)
    for again in "ab":
        both.run(
            *(
                arrival(f"{again}{i}", prompt, max_tokens=TOKENS, logit_bias=BANS, logprobs=1)
                for i, prompt in enumerate(PROMPTS)
            )
        )
    return both


@pytest.fixture(scope="module")
def expected(checkpoint: Any, reference: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log probabilities, from transformers."""
    compute = reference("llama")
    found = []
    for prompt in PROMPTS:
        ids, logprobs = list(prompt), []
        for _ in range(TOKENS):
            scores = compute(ids)[-1]
            scores[2] = -torch.inf
            scores = torch.log_softmax(scores, -1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
        found.append((ids[len(prompt) :], logprobs))
    return found


@pytest.mark.parametrize("depth", [0, 1], ids=["settled", "overlap"])
@pytest.mark.parametrize("tokens", [None, 128], ids=["roomy", "tight"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("page_size", [1, 16])
def test_equals_transformers(
    page_size: int, chunk: int, tokens: int | None, depth: int, checkpoint: Any, expected: Any
) -> None:
    pages = (tokens or 2048) // page_size
    engine = build_engine(
        replace(TINY, page_size=page_size, num_pages=pages, max_running=8), locate(str(checkpoint("llama")))
    )
    try:
        both = run(engine, SchedulerConfig(max_prefill_tokens=chunk), depth)
    finally:
        engine.close()
    for again in "ab":
        for i, (ids, logprobs) in enumerate(expected):
            heard = both.ledger.heard[f"{again}{i}"]
            assert heard.tokens == ids, (again, i)
            assert [row.logprob for row in heard.logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert both.scheduler.stats.cache_hit_tokens > 0
    assert (both.scheduler.stats.retractions > 0) == (tokens is not None)
