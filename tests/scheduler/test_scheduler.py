import dataclasses
import random

import numpy as np
import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import Scheduler
from shared.errors import ConfigError
from tests.fakes.link import arrival
from tests.scheduler.driver import Driver, engine_config, is_idle, limits, solo


def test_one_request_says_what_it_says_alone():
    driver = Driver(engine_config())
    item = arrival("a", b"hello world", max_tokens=20)
    driver.add(item)
    driver.run()
    heard = driver.ledger.heard["a"]
    assert (heard.tokens, heard.finish) == solo(item)
    assert len(heard.tokens) == 20 and heard.finish == "length" and heard.starts == [(11, 0)]


def test_decode_rows_of_a_step_behind_an_unsettled_one_read_the_device():
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello", max_tokens=4))
    driver.run()
    assert [batch.input_ids.tolist()[-1] for batch in driver.batches[1:]] == [-1, -1, -1]
    assert [batch.out_index.tolist() for batch in driver.batches] == [[1], [2], [3], [4]]
    alone = Driver(engine_config(), depth=0)
    alone.add(arrival("a", b"hello", max_tokens=4))
    alone.run()
    assert [batch.input_ids.tolist()[-1] for batch in alone.batches[1:]] == driver.tokens("a")[:3]


def test_no_step_is_planned_past_a_length_end():
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello", max_tokens=1))
    driver.run()
    assert len(driver.batches) == 1


def test_tokens_of_an_overlapped_step_behind_an_end_token_are_dropped():
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello", max_tokens=50, logit_bias={258: 100.0}))
    driver.run()
    heard = driver.ledger.heard["a"]
    assert heard.tokens == [258] and heard.finish == "stop"
    assert len(driver.batches) == 2, "the second step was under way already"
    assert driver.scheduler.load().free_slots == 4


@pytest.mark.parametrize(
    ("params", "tokens", "finish"),
    [
        ({"stop_token_ids": [65], "logit_bias": {65: 100.0}}, 1, "stop"),
        ({"logit_bias": {258: 100.0}, "ignore_eos": True, "max_tokens": 5}, 5, "length"),
        ({"logit_bias": {258: 100.0}, "min_tokens": 3}, 4, "stop"),
        ({"stop_token_ids": [65], "logit_bias": {65: 100.0}, "min_tokens": 2}, 3, "stop"),
        ({"stop_token_ids": [65], "logit_bias": {65: 100.0}, "max_tokens": 1}, 1, "stop"),
    ],
)
def test_finish_rules(params, tokens, finish):
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello", **params))
    driver.run()
    heard = driver.ledger.heard["a"]
    assert (len(heard.tokens), heard.finish) == (tokens, finish)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_chunks_draw_no_token_and_share_the_step_with_decode(chunk, depth):
    driver = Driver(engine_config(), SchedulerConfig(max_prefill_tokens=chunk), depth)
    first, second = arrival("a", b"hello", max_tokens=60), arrival("b", b"x" * 40, max_tokens=3)
    driver.add(first)
    driver.turn()
    driver.add(second)
    driver.run()
    assert driver.tokens("a") == solo(first)[0] and driver.tokens("b") == solo(second)[0]
    for batch in driver.batches:
        assert batch.lengths[batch.num_decode :].sum() <= chunk
    prompt_steps = [batch for batch in driver.batches if batch.num_rows > batch.num_decode]
    assert len(prompt_steps) >= -(-40 // chunk)
    beside_a_running_row = [batch for batch in prompt_steps if batch.num_decode]
    assert beside_a_running_row, "prompts wait for no running request, and running requests for no prompt"


def test_a_prefix_hit_leaves_a_token_to_compute_and_is_reported():
    driver = Driver(engine_config())
    prompt = b"the same twelve.."[:16]
    driver.add(arrival("a", prompt))
    driver.run()
    driver.add(arrival("b", prompt))
    driver.run()
    assert driver.ledger.heard["b"].starts == [(16, 12)]
    assert driver.batches[-8].lengths.tolist() == [4]
    assert driver.tokens("a") == driver.tokens("b")


def test_a_conversation_hits_what_was_said_but_not_its_last_token():
    driver = Driver(engine_config(page_size=1))
    driver.add(arrival("a", b"hello", max_tokens=6))
    driver.run()
    driver.add(arrival("b", [*b"hello", *driver.tokens("a"), *b"more"]))
    driver.run()
    assert driver.ledger.heard["b"].starts == [(15, 5 + 5)]


def test_prefixes_are_not_shared_across_salts():
    driver = Driver(engine_config())
    for uid, salt in (("a", ""), ("b", "x"), ("c", "x")):
        driver.add(arrival(uid, b"0123456789abcdef", salt=salt))
        driver.run()
    assert [driver.ledger.heard[uid].starts[0][1] for uid in "abc"] == [0, 0, 12]


def test_naive_cache_hits_nothing_and_keeps_nothing():
    driver = Driver(engine_config(), SchedulerConfig(cache="naive"))
    for uid in "ab":
        driver.add(arrival(uid, b"0123456789abcdef" * 8))
    driver.run()
    assert [driver.ledger.heard[uid].starts[0][1] for uid in "ab"] == [0, 0]
    assert driver.scheduler.pages.pool.num_free == 64


def test_twins_wait_for_the_first_of_them_and_share_its_prompt():
    driver = Driver(engine_config(num_pages=512))
    items = [arrival(uid, b"p" * 100, seed=i, temperature=1.0) for i, uid in enumerate("abc")]
    driver.add(*items)
    driver.run()
    assert [driver.ledger.heard[uid].starts[0][1] for uid in "abc"] == [0, 96, 96]
    assert [driver.tokens(uid) for uid in "abc"] == [solo(item)[0] for item in items]
    assert driver.tokens("a") != driver.tokens("b")


def test_prompt_that_can_never_fit_is_refused_at_once_and_blocks_nobody():
    driver = Driver(engine_config(num_pages=8))
    driver.add(arrival("big", b"x" * 33), arrival("a", b"hello"))
    assert driver.ledger.heard["big"].error.code == "context_length_exceeded"
    assert driver.ledger.heard["big"].error.status == 400
    driver.run()
    assert driver.ledger.heard["a"].finish == "length"


def test_answer_longer_than_the_pool_ends_by_length_where_the_pool_ends():
    driver = Driver(engine_config(num_pages=8))
    driver.add(arrival("a", b"x" * 20, max_tokens=400))
    driver.run()
    assert driver.ledger.heard["a"].finish == "length"
    assert len(driver.tokens("a")) == 32 + 1 - 20


@pytest.mark.parametrize(("prompt", "params"), [([], {}), ([259], {}), ([-1], {}), ([65], {"logit_bias": {259: 1.0}})])
def test_ids_outside_the_vocabulary_are_refused(prompt, params):
    driver = Driver(engine_config())
    driver.add(arrival("a", prompt, **params))
    assert driver.ledger.heard["a"].error.status == 400


def test_retraction_repeats_and_skips_nothing():
    items = [arrival(uid, bytes([65 + i]) * 20, max_tokens=40) for i, uid in enumerate("abcd")]
    driver = Driver(engine_config(num_pages=24))
    driver.add(*items)
    driver.run()
    assert driver.scheduler.stats.retractions > 0
    for item in items:
        heard = driver.ledger.heard[item.request.uid]
        assert (heard.tokens, heard.finish) == solo(item)
        assert len(heard.starts) == 1


def test_pool_of_600_tokens_serves_eight_requests_without_thrashing():
    items = [arrival(str(i), bytes([65 + i]) * 52, max_tokens=100) for i in range(8)]
    driver = Driver(engine_config(num_pages=600, page_size=1, max_running=8))
    driver.add(*items)
    driver.run()
    for item in items:
        assert driver.tokens(item.request.uid) == solo(item)[0]
    assert len(driver.batches) < 8 * 100, "no slower than one after the other"
    assert driver.scheduler.stats.retractions < 24


def test_youngest_is_retracted_first_and_urgent_last():
    driver = Driver(engine_config(num_pages=12), depth=0)
    driver.add(arrival("old", b"a" * 16, max_tokens=30, priority=1), arrival("new", b"b" * 16, max_tokens=30))
    while not driver.scheduler.stats.retractions:
        assert driver.turn()
    assert [req.uid for req in driver.scheduler.slots.live()] == ["new"]
    driver.run()


def test_forget_while_a_step_is_in_flight_frees_nothing_before_it_has_retired():
    driver = Driver(engine_config(max_running=1))
    driver.add(arrival("a", b"hello", max_tokens=50), arrival("b", b"world", max_tokens=2))
    driver.turn()
    driver.turn()
    assert driver.steps, "a step is in flight"
    assert driver.forget("a")
    assert driver.scheduler.slots.num_free == 0 and driver.scheduler.pages.pool.num_quarantined > 0
    assert not driver.forget("a")
    driver.run()
    assert driver.ledger.heard["b"].finish == "length"
    assert len(driver.tokens("a")) == 1


def test_forget_looks_at_the_attempt():
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello", attempt=5))
    assert not driver.forget("a", 4)
    assert driver.forget("a", 5)
    assert is_idle(driver.scheduler)


def test_a_higher_attempt_replaces_and_a_lower_one_is_void():
    driver = Driver(engine_config())
    item = arrival("a", b"hello", attempt=5, max_tokens=20)
    driver.add(item)
    driver.turn()
    driver.turn()
    driver.turn()
    said = driver.tokens("a")[:1]
    driver.add(arrival("a", b"hello", attempt=6, said=said, max_tokens=20))
    driver.scheduler.add(arrival("a", b"hello", attempt=5, max_tokens=20))
    driver.run()
    heard = driver.ledger.heard["a"]
    assert (heard.tokens, heard.finish) == solo(item) and set(heard.attempts[-19:]) == {6}


@pytest.mark.parametrize("said", [0, 1, 5, 19])
def test_takeover_goes_on_at_the_next_index(said):
    item = arrival("a", b"hello world", max_tokens=20, temperature=1.0, seed=3)
    whole, _ = solo(item)
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello world", max_tokens=20, temperature=1.0, seed=3, attempt=7, said=whole[:said]))
    driver.run()
    heard = driver.ledger.heard["a"]
    assert heard.tokens == whole and heard.starts == [(11, 0)] and len(heard.attempts) == 20 - said


@pytest.mark.parametrize(("said", "finish"), [([65] * 8, "length"), ([65, 258], "stop"), ([66, 67], "stop")])
def test_takeover_of_a_choice_that_was_all_said_ends_without_a_token(said, finish):
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello", said=said, stop_token_ids=[67]))
    heard = driver.ledger.heard["a"]
    assert heard.finish == finish and heard.tokens == said and heard.starts == [(5, 0)]
    assert is_idle(driver.scheduler)


def test_bad_logits_end_one_request_and_stay_out_of_the_cache():
    driver = Driver(engine_config(nan_marker=(1, 2)))
    good = arrival("good", b"0123456789", max_tokens=10)
    driver.add(arrival("bad", [*b"0123456789ab", 1, 2, 3, 4], max_tokens=10), good)
    driver.run()
    assert driver.ledger.heard["bad"].error.status == 500 and not driver.tokens("bad")
    assert driver.tokens("good") == solo(good)[0]
    driver.add(arrival("again", b"0123456789abcdef"))
    driver.run()
    assert driver.ledger.heard["again"].starts == [(16, 8)], "only the sound request's pages are shared"
    assert driver.scheduler.stats.bad_rows == 1


def test_a_row_that_goes_bad_in_mid_stream_leaves_what_was_cached_and_adds_nothing():
    driver = Driver(engine_config(), depth=0)
    driver.add(arrival("a", b"0123456789", max_tokens=50))
    for _ in range(8):
        driver.turn()
    batch = driver.scheduler.plan()
    result = driver.engine.wait(driver.engine.launch(batch))
    bad = dataclasses.replace(result, bad=np.ones(1, np.bool_))
    assert driver.scheduler.settle(batch, bad, 1) is None
    (failure,) = driver.scheduler.take_failures()
    assert (failure.uid, failure.error.code) == ("a", "bad_logits")
    driver.scheduler.check()
    assert is_idle(driver.scheduler) and driver.scheduler.pages.cache.num_pages == 10 // 4


def test_logprobs_reach_the_place_of_their_request():
    driver = Driver(engine_config())
    driver.add(arrival("a", b"hello"), arrival("b", b"world", logprobs=3))
    driver.run()
    assert not driver.ledger.heard["a"].logprobs
    entries = driver.ledger.heard["b"].logprobs
    assert [int(entry.top_ids[0]) for entry in entries] == driver.tokens("b") and len(entries[0].top_ids) == 3


def test_priority_goes_first():
    driver = Driver(engine_config(max_running=1), depth=0)
    driver.add(arrival("a", b"a"), arrival("b", b"b", priority=5), arrival("c", b"c", priority=-1))
    order = []
    while driver.turn():
        order += [uid for uid, heard in driver.ledger.heard.items() if heard.ended and uid not in order]
    assert order == ["c", "a", "b"]


def test_decode_rows_come_longest_first():
    driver = Driver(engine_config())
    driver.add(arrival("a", b"aa"), arrival("b", b"b" * 30), arrival("c", b"c" * 9))
    driver.run()
    for batch in driver.batches:
        starts = batch.starts[: batch.num_decode].tolist()
        assert starts == sorted(starts, reverse=True)


def test_step_smaller_than_the_batch_is_no_engine():
    with pytest.raises(ConfigError, match="max_step_tokens"):
        Scheduler(limits(max_step_tokens=3))


@pytest.mark.parametrize("hot", [False, True])
def test_long_prompt_at_the_head_starts_under_a_constant_load_of_short_ones(hot):
    """Also when the short ones have a cached prefix, and would need fewer pages than their turn is worth."""
    driver = Driver(engine_config(num_pages=256, max_running=8, max_seq_len=1024, max_step_tokens=1024))
    count = 0

    def load_up():
        nonlocal count
        while len(driver.scheduler.slots.live()) + len(driver.scheduler.prefill.ready) < 8:
            count += 1
            driver.add(arrival(f"s{count}", [0 if hot else count % 250, *b" hello" * 8], max_tokens=50))

    for _ in range(100):
        load_up()
        driver.turn()
    driver.add(arrival("long", [7] * 700, max_tokens=20))
    turns, began, silent, longest = 0, 0, 0, 0
    while not driver.ledger.heard["long"].ended:
        load_up()
        said = {uid: len(heard.tokens) for uid, heard in driver.ledger.heard.items()}
        driver.turn()
        turns += 1
        began = began or (turns if driver.tokens("long") else 0)
        short = any(len(h.tokens) > said.get(uid, 0) for uid, h in driver.ledger.heard.items() if uid != "long")
        silent = 0 if short else silent + 1
        longest = max(longest, silent)
    assert turns < 200
    assert longest <= turns - began, "the short ones stand still for longer than the long one runs"


@pytest.mark.parametrize("depth", [0, 1])
def test_short_prompt_does_not_wait_for_a_very_long_one(depth):
    sizes = {"num_pages": 1024, "max_seq_len": 4096, "max_step_tokens": 512}
    driver = Driver(engine_config(**sizes), SchedulerConfig(max_prefill_tokens=64), depth)
    driver.add(arrival("long", b"x" * 3000, max_tokens=2))
    for _ in range(5):
        driver.turn()
    driver.add(arrival("short", b"hello", max_tokens=2), arrival("middle", b"y" * 300, max_tokens=2))
    for _ in range(4):
        driver.turn()
    assert driver.tokens("short"), "it was computed beside the long one"
    driver.run()
    halves = [int(b.lengths[list(b.slots).index(0)]) for b in driver.batches if 0 in b.slots][:40]
    assert min(halves) >= 32, "the long one never gets less than half"
    shares = [int(b.lengths[b.num_decode :].sum()) for b in driver.batches[:40]]
    assert shares == [64] * 40, "what nobody takes goes to the long one"


@pytest.mark.parametrize("seed", range(4))
def test_a_step_stays_within_its_tokens_when_rows_leave_hardly_any(seed):
    """With as many rows as a step has tokens the prompts under way get one or none, and still all are served."""
    rng = random.Random(seed)
    driver = Driver(engine_config(num_pages=2048, max_seq_len=1024, max_running=16, max_step_tokens=16))
    for i in range(60):
        length = int(rng.paretovariate(0.7)) * 4 % 600 + 1
        driver.add(arrival(f"r{i}", rng.randbytes(length), max_tokens=rng.randint(1, 60)))
    driver.run()
    assert all(driver.tokens(f"r{i}") for i in range(60))
    for batch in driver.batches:
        assert batch.lengths.sum() <= 16 and (batch.lengths > 0).all()


def test_running_rows_are_not_held_up_by_a_long_prompt():
    sizes = {"num_pages": 4096, "max_seq_len": 12_000, "max_step_tokens": 4096, "max_running": 8}
    config = SchedulerConfig(max_gap_ratio=2.5)
    driver = Driver(engine_config(base_ms=0.2, row_us=20.0, token_us=2.0, check=False, **sizes), config)
    driver.add(*(arrival(f"r{i}", bytes([i]) * 40, max_tokens=4000) for i in range(6)))
    for i in range(40):
        driver.turn()
        if i % 3 == 0:
            driver.add(arrival(f"w{i}", bytes([100 + i]) * 30, max_tokens=1))
    alone = 0.2 + 6 * 0.02
    first = len(driver.batches)
    driver.add(arrival("long", b"x" * 10_000, max_tokens=1))
    while not driver.ledger.heard["long"].ended:
        driver.turn()
    shares = [batch.lengths[batch.num_decode :].sum() for batch in driver.batches[first:]]
    steps_ms = sorted(alone + 0.002 * tokens for tokens in shares)
    assert steps_ms[int(len(steps_ms) * 0.99)] <= 3 * alone
    assert sum(shares) >= 10_000 and len(shares) < 200


@pytest.mark.parametrize(("running", "waiting", "bound"), [(4, 1, 96), (4, 4, 96), (1, 8, 400), (8, 16, 256)])
def test_more_that_wait_for_each_that_runs_make_longer_steps(running, waiting, bound):
    sizes = {"num_pages": 4096, "max_seq_len": 1000, "max_step_tokens": 400, "max_running": 32}
    driver = Driver(engine_config(base_ms=0.1, check=False, **sizes), SchedulerConfig(max_gap_ratio=2.5))
    driver.add(*(arrival(f"r{i}", bytes([i]) * 4, max_tokens=900) for i in range(running)))
    driver.turn()
    driver.turn()
    driver.add(*(arrival(f"w{i}", bytes([100 + i]) * 100, max_tokens=1) for i in range(waiting)))
    driver.turn()
    batch = driver.batches[-1]
    assert batch.num_decode == running
    assert batch.lengths[running:].sum() == min(100 * waiting, bound if bound < 400 else 400 - running)
