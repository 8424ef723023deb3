"""Scheduler and CPU engine with the embedded model: what pages, a warm cache and chunks must not change."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.ports import Engine
from services.scheduler.engine.engine import EngineConfig, build_engine
from shared.model_files import EMBEDDED_NAME, locate
from shared.vocab import load_vocabulary
from tests.engine.conftest import Reference
from tests.engine.scheduled import Scheduled
from tests.fakes.link import Heard, arrival

COUNTED = "one two three four five six seven eight nine ten " * 5 + "one two"
COPIED = " three four five six seven eight nine ten one two three four"
LONG = " hello" * 200 + " The capital of France is"
HELLO, COPY, COPY_ANSWER, LONG_IDS = load_vocabulary(locate(EMBEDDED_NAME)).encoder.encode_batch(
    ["hello", COUNTED, COPIED, LONG]
)
SIZES = EngineConfig(dtype="float32", max_running=8, max_step_tokens=1024, max_seq_len=1024)


@pytest.fixture(scope="module", params=[1, 16, 64])
def paged(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The model with pages of one size, 2,048 tokens in all."""
    engine = build_engine(
        replace(SIZES, page_size=request.param, num_pages=2048 // request.param), locate(EMBEDDED_NAME)
    )
    yield engine
    engine.close()


def test_prompts_around_a_page_border_say_the_same_with_a_warm_cache(paged: Engine) -> None:
    """Prompts of a length that fills pages, or nearly: cold, hot, one token longer, with another end, and hot again."""
    both = Scheduled(paged)
    size = paged.limits.page_size
    lengths = sorted({size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 52} - {0})
    prompts = {length: (COPY * 3)[-length:] for length in lengths}
    other = HELLO[0]

    def ask(phase: str, changed: dict[int, list[int]]) -> list[Heard]:
        # A salt per length: what one has cached is not a prefix of another.
        return both.run(
            *(
                arrival(f"{phase}{length}", prompt, salt=str(length), max_tokens=12, logprobs=1)
                for length, prompt in changed.items()
            )
        )

    cold, hot = ask("cold", prompts), ask("hot", prompts)
    longer = ask("longer", {length: [*prompt, other] for length, prompt in prompts.items()})
    changed = ask("changed", {length: [*prompt[:-1], other] for length, prompt in prompts.items()})
    again = ask("again", prompts)
    for length, first, *others in zip(lengths, cold, hot, again, strict=True):
        for heard in others:
            assert heard.tokens == first.tokens, length
            assert heard.logprobs[0].logprob == pytest.approx(first.logprobs[0].logprob, abs=0.05)
        if 29 <= length <= 52:
            assert first.tokens == COPY_ANSWER, length
    # What was hot is what was computed: whole pages of the prompt, but for its last token.
    assert [heard.starts[0][1] for heard in hot] == [(length - 1) // size * size for length in lengths]
    fresh = Scheduled(paged, SchedulerConfig(cache="naive"))
    for name, prompt, found in (("longer", [*prompts[52], other], longer), ("changed", [*COPY[:-1], other], changed)):
        (alone,) = fresh.run(arrival(name, prompt, max_tokens=12, logprobs=1))
        assert found[lengths.index(52)].tokens == alone.tokens


@pytest.fixture(scope="module")
def roomy() -> Iterator[Engine]:
    """The model with pages and steps for all of it."""
    engine = build_engine(replace(SIZES, num_pages=256), locate(EMBEDDED_NAME))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def likeliest(smollm2_reference: Reference) -> float:
    """Log probability of the token behind the long prompt."""
    return float(smollm2_reference(LONG_IDS)[-1].max())


@pytest.mark.parametrize("chunk", [16, 64, 1024])
def test_chunks_beside_running_rows_change_nothing(chunk: int, roomy: Engine, likeliest: float) -> None:
    both = Scheduled(roomy, SchedulerConfig(cache="naive", max_prefill_tokens=chunk))
    alone = both.run(arrival("copy", COPY, max_tokens=12), arrival("long", LONG_IDS, max_tokens=3, logprobs=1))
    running = [arrival(f"n{i}", [*HELLO, 1000 + i], max_tokens=40, logit_bias={2: -100.0}) for i in range(4)]
    both.add(*running)
    while not all(both.ledger.heard[item.request.uid].tokens for item in running):
        both.turn()
    first = len(both.batches)
    slots = both.batches[-1].slots[:4]
    exact = (LONG_IDS * 2)[-min(chunk, 64) :]
    beside = both.run(
        arrival("copy beside", COPY, max_tokens=12),
        arrival("long beside", LONG_IDS, max_tokens=3, logprobs=1),
        *(
            arrival(name, ids, max_tokens=2)
            for name, ids in (("less", exact[1:]), ("exact", exact), ("more", [*exact, *HELLO]))
        ),
    )
    for copy, long in (alone, beside[:2]):
        assert copy.tokens == COPY_ANSWER
        assert len(long.tokens) == 3
        assert long.logprobs[0].logprob == pytest.approx(likeliest, abs=1e-2)
    assert [len(heard.tokens) for heard in beside[2:]] == [2, 2, 2]
    assert all(len(both.ledger.heard[item.request.uid].tokens) == 40 for item in running)
    # No chunk is longer than it may be, and none takes a step from those that run.
    for batch in both.batches[first : first + 32]:
        assert batch.lengths[batch.num_decode :].sum() <= chunk
        assert np.isin(slots, batch.slots[: batch.num_decode]).all()
