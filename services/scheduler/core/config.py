"""The policy of a scheduler, and its counters. Plain data."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Policy of one scheduler.

    Attributes:
        cache: "radix" keeps prefixes of ended requests, "naive" keeps nothing.
        max_prefill_tokens: prompt tokens one step computes at most; the engine's max_step_tokens bounds it too.
        max_gap_ratio: while requests decode, a step with prompt tokens may take this many times the step without
            them, as the fitted cost model sees it, and longer while more requests wait to start than run; 0 leaves
            the token budget alone to decide.
    """

    cache: Literal["radix", "naive"] = "radix"
    max_prefill_tokens: int = 2048
    max_gap_ratio: float = 2.9


@dataclass(slots=True)
class SchedulerStats:
    """Counters, read by metrics from another thread; they only grow."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    evicted_pages: int = 0
    retractions: int = 0
    forgotten: int = 0
    bad_rows: int = 0
    refused: int = 0
    finished: Counter[str] = field(default_factory=Counter)
