"""What finished requests leave in the broker: nothing."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import redis

from tests.e2e.stack import Json, Stack
from tests.waiting import eventually

CHAT = "/v1/chat/completions"
FIXED = re.compile(r"^[^:]+:(meta|alive:\w+|dead|tokenize:[^:]+|inbox:[^:]+|generate:[^:]+|tokens:[^:]+:\d+)$")
"""Keys that belong to the installation and its instances, not to a request."""


def of_requests(broker: "redis.Redis") -> set[str]:
    return {key for key in broker.scan_iter(count=1000) if not FIXED.match(key)}


def streams(broker: "redis.Redis") -> dict[str, int]:
    """Give the entries left in each stream that its reader empties."""
    keys = [key for key in broker.scan_iter(count=1000) if re.search(r":(tokenize|generate|tokens):", key)]
    return {key: length for key in keys if (length := broker.xlen(key))}


def ask(stack: Stack, number: int) -> int:
    """Ask for an answer that ends at once, every other one as a stream; give what it says it cost."""
    body = stack.chat_body(max_tokens=50, logit_bias={"2": 100})
    if number % 2:
        answer = stack.client.post(CHAT, json=body).json()
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        return int(answer["usage"]["completion_tokens"])
    with stack.streaming(CHAT, {**body, "stream_options": {"include_usage": True}}) as events:
        seen = list(events)
    assert seen.pop() == "[DONE]"
    chunks: list[Json] = [json.loads(event) for event in seen]
    reasons = [[c["finish_reason"] for c in chunk["choices"]] for chunk in chunks]
    assert reasons[-2:] == [["stop"], []], "after the end comes the usage and nothing else"
    return int(chunks[-1]["usage"]["completion_tokens"])


def test_an_idle_broker_holds_nothing_of_finished_requests(real: Stack) -> None:
    with real.redis() as broker:
        eventually(lambda: not of_requests(broker), "an idle broker")
        idle = broker.dbsize()
        with ThreadPoolExecutor(8) as pool:
            costs = list(pool.map(lambda number: ask(real, number), range(100)))
        assert len(set(costs)) == 1 and costs[0] in (0, 1)
        eventually(lambda: not of_requests(broker), "no key of a request", 60)
        assert not streams(broker)
        assert broker.dbsize() <= idle + 8, "no more than streams that are now there for good"
    log = real.log.read_text(errors="replace")
    assert "unknown uid" not in log.lower()


def test_an_abandoned_stream_leaves_nothing_either(real: Stack) -> None:
    body = real.complete_body("Tell me a long story.", max_tokens=4000, logit_bias={"2": -100, "0": -100})
    with real.redis() as broker:
        for _ in range(4):
            with real.streaming("/v1/completions", body) as events:
                next(events)
        eventually(lambda: real.running() == 0, "nothing runs")
        eventually(lambda: not of_requests(broker), "no key of a request", 70)
        assert not streams(broker)


def test_keys_of_requests_carry_a_time_to_live(real: Stack) -> None:
    body = real.complete_body("Tell me a story.", max_tokens=300, logit_bias={"2": -100, "0": -100})
    with real.redis() as broker, real.streaming("/v1/completions", body) as events:
        for _ in range(5):
            next(events)
        keys = of_requests(broker)
        assert keys
        assert all(broker.pttl(key) > 0 for key in keys)
