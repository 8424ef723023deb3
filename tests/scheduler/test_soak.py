"""Random lives of many requests on small pools: everything said must be what the request says alone.

A request that is forgotten was closed by its client, passed its deadline or said a stop string: to an engine these are
one thing. The driver checks the books after every move.
"""

import random

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.fake_engine import FakeEngineConfig
from tests.fakes.link import arrival
from tests.scheduler.driver import Driver, engine_config, is_idle, solo

PREFIXES = [b"You are a helpful assistant. ", b"You are a pirate. ", b"", b"q" * 70]


def _engine(page_size: int, rng: random.Random) -> FakeEngineConfig:
    tokens = rng.choice([160, 300, 1200])
    return engine_config(
        page_size=page_size,
        num_pages=tokens // page_size,
        max_running=rng.choice([1, 3, 8]),
        max_seq_len=144,
        max_step_tokens=200,
        eos_every=40,
    )


def _request(uid: str, rng: random.Random):
    prompt = rng.choice(PREFIXES) + bytes(rng.choice(b"ab") for _ in range(rng.randint(1, 40)))
    params = {"max_tokens": rng.choice([1, 2, 7, 30, 90]), "priority": rng.choice([0, 0, 1])}
    if rng.random() < 0.4:
        params |= {"temperature": 1.0, "seed": rng.randint(-(2**63), 2**63 - 1)}
    if rng.random() < 0.2:
        params["min_tokens"] = 5
    if rng.random() < 0.2:
        params["stop_token_ids"] = [101, 116]
    return {"prompt": prompt, "salt": rng.choice(["", "", "s"]), **params}


def _live(seed: int, page_size: int, chunk: int, depth: int, cache: str, num_requests: int = 40) -> Driver:
    rng = random.Random(seed)
    driver = Driver(_engine(page_size, rng), SchedulerConfig(cache=cache, max_prefill_tokens=chunk), depth)
    kept: dict[str, dict] = {}
    attempts: dict[str, int] = {}
    while len(kept) < num_requests or not is_idle(driver.scheduler):
        move = rng.random()
        running = [uid for uid in kept if not driver.ledger.heard[uid].ended and not driver.ledger.heard[uid].forgotten]
        if move < 0.2 and len(kept) < num_requests:
            uid = f"u{len(kept)}"
            kept[uid], attempts[uid] = _request(uid, rng), 1
            driver.add(arrival(uid, attempt=1, **kept[uid]))
        elif move < 0.24 and running:
            driver.forget(rng.choice(running), 1 << 40)
        elif move < 0.28 and running:
            # Taken over: by itself under a new attempt, from what was said up to now or a little less.
            uid = rng.choice(running)
            attempts[uid] += 1
            said = driver.tokens(uid)
            said = said[: max(0, len(said) - rng.choice([0, 0, 1, 2]))]
            driver.add(arrival(uid, attempt=attempts[uid], said=said, **kept[uid]))
        else:
            driver.turn()
    for uid, request in kept.items():
        heard = driver.ledger.heard[uid]
        tokens, finish = _expected(arrival(uid, **request), driver)
        if heard.forgotten:
            assert heard.tokens == tokens[: len(heard.tokens)], uid
        else:
            assert (heard.tokens, heard.finish) == (tokens, finish), uid
    pool = driver.scheduler.pages.pool
    assert pool.num_free + driver.scheduler.pages.cache.num_evictable == pool.num_pages
    assert driver.scheduler.slots.num_free == driver.scheduler.slots.num_slots
    return driver


def _expected(item, driver: Driver) -> tuple[list[int], str | None]:
    """The solo answer, cut where this engine's context or pool ends."""
    limits = driver.engine.limits
    tokens, finish = solo(item, eos_every=40)
    room = min(limits.max_seq_len, limits.num_pages * limits.page_size + 1) - len(item.request.prompt_ids)
    return (tokens[:room], "length") if len(tokens) > room else (tokens, finish)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("page_size", [1, 16])
def test_random_lives(page_size, chunk, depth):
    for seed in range(6):
        _live(seed, page_size, chunk, depth, "radix")


@pytest.mark.parametrize("page_size", [1, 16])
def test_random_lives_without_cache(page_size):
    for seed in range(100, 104):
        _live(seed, page_size, 64, 1, "naive")


def test_the_soak_sees_retractions_hits_and_evictions():
    stats = [_live(seed, 16, 64, 1, "radix").scheduler.stats for seed in range(6)]
    assert sum(s.retractions for s in stats) > 0
    assert sum(s.cache_hit_tokens for s in stats) > 0
    assert sum(s.evicted_pages for s in stats) > 0
    assert sum(s.forgotten for s in stats) > 0
