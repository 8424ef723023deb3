"""Many requests at once with the embedded model: each says what it says alone, whatever runs and ran beside it."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.stack import Json, Stack, finish_of, text_of
from tests.e2e.test_answers import COPIED, COPY
from tests.e2e.test_wire_form import COMPLETIONS, HELLO, LONG
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

TIGHT_PAGES = 38
"""Of 16 tokens: 600 in all."""
NUM_TOKENS = 60
"""Of an answer: one of each kind has room, and what is asked for at once needs half as much again."""


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded model with few pages."""
    flags = ("--dtype", "float32", "--max-running-requests", "16", "--num-pages", str(TIGHT_PAGES))
    stack = Stack(
        tmp_path_factory.mktemp("tight"), *flags, "--page-size", "16", "--max-seq-len", "600", "--threads", "1"
    )
    try:
        yield stack
    finally:
        stack.close()


def test_a_seeded_answer_does_not_depend_on_what_ran_before(real: Stack) -> None:
    fields: Json = {"temperature": 1.5, "max_tokens": 24, "logit_bias": LONG}

    def ask(**seed: int) -> str:
        text: str = real.chat("Tell me something.", **fields, **seed)["choices"][0]["message"]["content"]
        return text

    texts = [ask(seed=7)]
    unseeded = []
    for other in range(5):
        unseeded += [ask()]
        assert ask(seed=100 + other) != texts[0]
    texts.append(ask(seed=7))
    with ThreadPoolExecutor(3) as pool:
        texts += list(pool.map(lambda _: ask(seed=7), range(3)))
    texts.append(ask(seed=7))
    assert len(set(texts)) == 1
    unseeded += [ask(), ask()]
    assert len({*unseeded, texts[0]}) == len(unseeded) + 1


def test_penalties_and_bias_stay_with_their_request_in_any_order(real: Stack) -> None:
    """In random order, so that slots change hands while others are in mid-stream."""
    penalty = {"prompt": "no, no, no, no, no, no, no,", "max_tokens": 40, "frequency_penalty": 2, "logit_bias": LONG}
    copy = {"prompt": COPY, "max_tokens": 12}
    forced = {"prompt": COPY, "max_tokens": 12, "logit_bias": HELLO}
    expected = {"copy": COPIED, "forced": "Hello" * 12}
    rng = random.Random(7)

    def ask(named: tuple[str, Json]) -> tuple[str, str]:
        return named[0], real.complete(**named[1])["choices"][0]["text"]

    for _ in range(3):
        requests = [("copy", copy), ("penalty", penalty), ("forced", forced)] * 4
        rng.shuffle(requests)
        with ThreadPoolExecutor(len(requests)) as pool:
            for name, text in pool.map(ask, requests):
                expected.setdefault(name, text)
                assert text == expected[name], name


def test_when_pages_run_out_nobody_loses_or_repeats_a_token(tight: Stack) -> None:
    """Retraction of every kind of request: plain, several choices, logprobs, seeds, stop strings, closed half-way."""
    body = {"max_tokens": NUM_TOKENS, "logit_bias": LONG}
    kinds: list[Json] = [
        {},
        {"n": 2},
        {"logprobs": 0},
        {"temperature": 1.0, "seed": 5},
        {"stop": ["nothing says this"]},
    ]
    with ThreadPoolExecutor(len(kinds)) as pool:  # one of each has room
        solo = list(pool.map(lambda kind: tight.complete(COPY, **body, **kind), kinds))
    assert tight.metric("scheduler-0", "millrace_retractions_total") == 0
    used = tight.metric("scheduler-0", "millrace_generated_tokens_total")

    def close_early(_: int) -> None:
        with tight.streaming(COMPLETIONS, tight.complete_body(COPY, **body)) as events:
            for _, _ in zip(range(15), events, strict=False):
                pass

    def ask(kind: int) -> list[Json]:
        options = {"stream_options": {"include_usage": True}}
        return tight.stream(COMPLETIONS, tight.complete_body(COPY, **body, **kinds[kind], **options))

    with ThreadPoolExecutor(12) as pool:
        closed = [pool.submit(close_early, i) for i in range(2)]
        streams = list(pool.map(ask, [0, 1, 2, 3, 4] * 2))
        for future in closed:
            future.result()
    for chunks, kind in zip(streams, [0, 1, 2, 3, 4] * 2, strict=True):
        for choice in solo[kind]["choices"]:
            text = text_of(chunks, choice["index"])
            assert text == choice["text"], kinds[kind]
            assert finish_of(chunks, choice["index"]) == "length"
        assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS * len(solo[kind]["choices"])
    entries = [c["logprobs"] for chunk in streams[2] for c in chunk["choices"] if c.get("logprobs")]
    assert sum(len(entry["token_logprobs"]) for entry in entries) == NUM_TOKENS
    assert tight.metric("scheduler-0", "millrace_retractions_total") > 0
    # No token was drawn in vain but those of the requests that were closed.
    drawn = tight.metric("scheduler-0", "millrace_generated_tokens_total") - used
    assert 12 * NUM_TOKENS <= drawn <= 14 * NUM_TOKENS
    eventually(lambda: tight.running() == 0, "nothing runs any more")
    eventually(lambda: is_whole(tight), "every page is free or cached")


def is_whole(stack: Stack) -> bool:
    """Whether no page is live or held back."""
    pages = {
        state: stack.metric("scheduler-0", "millrace_kv_pages", state=state)
        for state in ("free", "cached", "live", "quarantined")
    }
    return pages["live"] == pages["quarantined"] == 0 and pages["free"] + pages["cached"] == TIGHT_PAGES
