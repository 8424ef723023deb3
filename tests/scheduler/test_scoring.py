"""Prompts whose tokens are reported: scored in chunks of any size, once per choice, without the prefix cache."""

import numpy as np
import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.outbox import make_chunk
from tests.fakes.link import arrival
from tests.scheduler.driver import Driver, engine_config, solo

PROMPT = b"the wheel turns as the water runs"


def drive(*arrivals, chunk: int = 512, depth: int = 1, **engine) -> Driver:
    driver = Driver(engine_config(**engine), SchedulerConfig(max_prefill_tokens=chunk), depth)
    driver.add(*arrivals)
    driver.run()
    return driver


def scored(echo) -> int:
    assert all(len(piece.logprobs) == len(piece.top_ids) == len(piece.top_logprobs) for piece in echo.scores)
    return sum(len(piece.logprobs) for piece in echo.scores)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_every_token_but_the_first_is_scored_once(chunk: int, depth: int, max_tokens: int) -> None:
    item = arrival("a", PROMPT, max_tokens=max_tokens, prompt_logprobs=2)
    heard = drive(item, chunk=chunk, depth=depth).ledger.heard["a"]
    assert len(heard.prompts) == 1
    echo = heard.prompts[0]
    assert bytes(echo.token_ids.tolist()) == PROMPT and scored(echo) == len(PROMPT) - 1
    assert np.concatenate([piece.top_ids for piece in echo.scores])[:, 0].tolist() == list(PROMPT[1:])
    assert heard.starts == [(len(PROMPT), 0)] and heard.finish == "length"
    assert heard.tokens == (solo(item)[0] if max_tokens else [])


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    heard = drive(arrival("a", b"x", max_tokens=0, prompt_logprobs=0)).ledger.heard["a"]
    assert scored(heard.prompts[0]) == 0 and heard.finish == "length" and heard.tokens == []


def test_a_cached_prompt_is_scored_like_a_new_one_and_fills_the_cache() -> None:
    driver = drive(arrival("a", PROMPT, max_tokens=0, prompt_logprobs=1))
    driver.add(arrival("b", PROMPT, max_tokens=2), arrival("c", PROMPT, max_tokens=2, prompt_logprobs=1))
    driver.run()
    heard = driver.ledger.heard
    assert heard["b"].starts == [(len(PROMPT), len(PROMPT) // 4 * 4)]
    assert heard["c"].starts == [(len(PROMPT), 0)] and scored(heard["c"].prompts[0]) == len(PROMPT) - 1


def test_ids_are_returned_without_scores_and_with_the_cache() -> None:
    driver = drive(arrival("a", PROMPT, max_tokens=1))
    driver.add(arrival("b", PROMPT, max_tokens=1, returns_prompt=True))
    driver.add(arrival("c", PROMPT, max_tokens=0, returns_prompt=True))
    driver.run()
    for uid in "bc":
        echo = driver.ledger.heard[uid].prompts[0]
        assert bytes(echo.token_ids.tolist()) == PROMPT and not echo.scores
    assert driver.ledger.heard["b"].starts[0][1] > 0


def test_a_retracted_prompt_is_scored_anew_and_only_once() -> None:
    items = [
        arrival(f"u{i}", bytes([97 + i]) * 24, max_tokens=40, **({"prompt_logprobs": 0} if i > 1 else {}))
        for i in range(4)
    ]
    driver = drive(*items, chunk=5, num_pages=26, page_size=4, max_seq_len=80)
    assert driver.scheduler.stats.retractions > 0
    for item in items:
        heard = driver.ledger.heard[item.request.uid]
        assert heard.tokens == solo(item)[0]
        assert [scored(echo) for echo in heard.prompts] == ([23] if item.request.params.prompt_logprobs == 0 else [])


def test_a_takeover_scores_only_what_was_not_told() -> None:
    told = drive(arrival("a", PROMPT, attempt=2, said=[101], max_tokens=4, prompt_logprobs=1)).ledger.heard["a"]
    assert told.prompts == [] and len(told.tokens) == 4
    untold = drive(arrival("a", PROMPT, attempt=2, max_tokens=4, prompt_logprobs=1)).ledger.heard["a"]
    assert scored(untold.prompts[0]) == len(PROMPT) - 1


def test_bad_logits_of_a_scored_row_end_its_request() -> None:
    driver = Driver(engine_config(nan_marker=(7,)))
    driver.add(arrival("a", [7, 8, 9], max_tokens=3, prompt_logprobs=1), arrival("b", b"hello", max_tokens=3))
    driver.run()
    assert driver.ledger.heard["a"].error.code == "bad_logits"
    assert driver.ledger.heard["b"].finish == "length"


def test_the_prompt_of_several_choices_is_computed_once() -> None:
    prompt = bytes(range(97, 117)) * 6
    driver = drive(*(arrival(f"c{i}", prompt, max_tokens=3, seed=i, temperature=1.0) for i in range(4)))
    computed = sum(int(batch.lengths[batch.num_decode :].sum()) for batch in driver.batches)
    assert computed < len(prompt) + 4 * 4 + 4
    assert driver.ledger.heard["c0"].starts == [(len(prompt), 0)]


def test_entries_on_the_wire_have_a_place_for_every_token() -> None:
    driver = Driver(engine_config(), SchedulerConfig(max_prefill_tokens=5))
    outputs = []
    settle = driver.scheduler.settle
    driver.scheduler.settle = lambda *args: outputs.append(settle(*args)) or outputs[-1]
    driver.add(
        arrival("a", PROMPT, max_tokens=1, prompt_logprobs=2), arrival("b", b"xyz", max_tokens=1, returns_prompt=True)
    )
    driver.run()
    found = {}
    for output in filter(None, outputs):
        chunk = make_chunk("e", output, list(range(len(output.uids))))
        found |= {chunk.uids[place]: entries for place, entries in chunk.prompts.items()}
    assert [entry.token_id for entry in found["a"]] == list(PROMPT)
    assert (found["a"][0].logprob, found["a"][0].top) == (0.0, [])
    assert all(entry.logprob == -0.25 and len(entry.top) == 2 for entry in found["a"][1:])
    assert [(entry.token_id, entry.logprob) for entry in found["b"]] == [(i, 0.0) for i in b"xyz"]
