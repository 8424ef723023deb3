from collections import Counter
from typing import Any

from services.tokenizer.engines import Engines
from shared.messages import Heartbeat
from tests.tokenizer.requests import MODEL


def beat(count: int = 1, **fields: Any) -> Heartbeat:
    base: dict[str, Any] = {
        "model": MODEL,
        "max_seq_len": 1000,
        "max_running": 10,
        "num_pages": 100,
        "free_pages": 100,
        "page_size": 16,
    }
    return Heartbeat(beat=count, name="e", **(base | fields))


def engines(living: dict[str, Heartbeat]) -> Engines:
    return Engines(MODEL, lambda: living, model_seq_len=4096)


def test_nobody_is_chosen_while_there_is_nobody() -> None:
    living = {"draining": beat(draining=True), "other": beat(model="other")}
    assert engines({}).choose("k", 1) is None
    assert engines(living).choose("k", 1) is None


def test_the_least_loaded_engine_is_chosen() -> None:
    for busy in ({"num_running": 5}, {"num_waiting": 5}, {"queued_tokens": 900}, {"free_pages": 10}):
        assert engines({"a": beat(**busy), "b": beat(num_running=1)}).choose("k", 1) == "b"


def test_a_small_engine_with_one_request_is_fuller_than_a_large_one_with_two() -> None:
    assert engines({"a": beat(num_running=1, max_running=2), "b": beat(num_running=2)}).choose("k", 1) == "b"


def test_requests_between_two_heartbeats_are_spread() -> None:
    chooser = engines({"a": beat(), "b": beat(num_running=4)})
    chosen = Counter(chooser.choose(str(i), 16) for i in range(20))
    assert chosen == {"a": 12, "b": 8}


def test_a_long_prompt_counts_for_more_than_a_short_one() -> None:
    chooser = engines({"a": beat(), "b": beat()})
    first = chooser.choose("k", 800)
    assert [chooser.choose("k", 1) for _ in range(4)].count(first) == 0


def test_equals_are_told_apart_by_the_request() -> None:
    living = {"a": beat(), "b": beat()}
    assert {engines(living).choose(str(i), 1) for i in range(20)} == {"a", "b"}


def test_an_engine_that_is_gone_is_chosen_again_only_when_it_beats_again() -> None:
    living = {"a": beat(1)}
    chooser = engines(living)
    assert chooser.choose("k", 1) == "a"
    chooser.gone("a")
    assert chooser.choose("k", 1) is None
    living["a"] = beat(2)
    assert chooser.choose("k", 1) == "a"
    chooser.gone("never seen")
    assert chooser.choose("k", 1) == "a"


def test_the_length_limit_is_the_smallest_of_the_living() -> None:
    assert engines({}).max_seq_len == 4096
    assert engines({"a": beat(), "b": beat(max_seq_len=800)}).max_seq_len == 800
    assert engines({"a": beat(num_pages=32)}).max_seq_len == 512
    assert engines({"a": beat(num_pages=0)}).max_seq_len == 1000
    assert engines({"a": beat(), "x": beat(max_seq_len=5, model="other"), "y": beat(max_seq_len=0)}).max_seq_len == 1000
