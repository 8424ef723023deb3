"""Soak of many small worlds, each with an engine, a policy and requests of its own: see `worlds`."""

from collections import Counter

import pytest

from tests.scheduler.worlds import World

SEEDS = 48
GROUPS = 4


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_request_of_a_world_says_what_it_says_alone(group: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(group, SEEDS, GROUPS):
        stats = World(seed).live(30).scheduler.stats
        seen += Counter(
            retractions=stats.retractions,
            forgotten=stats.forgotten,
            refused=stats.refused,
            hits=stats.cache_hit_tokens,
            evictions=stats.evicted_pages,
            **stats.finished,
        )
    assert seen.keys() >= {"forgotten", "refused", "hits", "evictions", "stop", "length"}


@pytest.mark.parametrize("seed", range(12))
def test_nobody_waits_longer_than_for_those_before_it_one_after_the_other(seed: int) -> None:
    """Whatever the sizes: a request overtakes only what is less urgent, and pages held by some starve no others."""
    world = World(seed)
    waits = world.waits(30, bursts=seed % 2 == 0)
    assert waits
    assert all(turns <= 2 * owed + 20 for turns, owed in waits)
