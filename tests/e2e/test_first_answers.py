"""What one does first with a new service: ask it, stream from it, ask it eight times at once, walk away from it."""

import json
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.e2e.conftest import Reference
from tests.e2e.stack import Stack
from tests.waiting import eventually

LONG = {"2": -100, "0": -100}
"""Bans the end tokens, so that an answer has max_tokens tokens."""


@pytest.fixture
def openai(real: Stack) -> OpenAI:
    return OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [("Describe Beijing in one sentence.", 48), ("Count from 1 to 5.", 24), ("What is the capital of France?", 32)],
)
def test_chat_equals_transformers_word_for_word(real: Stack, reference: Reference, text: str, num_tokens: int) -> None:
    answer = real.chat(text, max_tokens=num_tokens)
    assert answer["choices"][0]["message"]["content"] == reference.greedy(reference.chat_ids(text), num_tokens)
    assert answer["usage"]["prompt_tokens"] == len(reference.chat_ids(text))


@pytest.mark.slow
def test_completion_equals_transformers_word_for_word(real: Stack, reference: Reference) -> None:
    prompt = "The capital of France is"
    ids: list[int] = reference.tokenizer(prompt)["input_ids"]
    assert real.complete(prompt, max_tokens=12)["choices"][0]["text"] == reference.greedy(ids, 12)
    assert real.complete(ids, max_tokens=12)["choices"][0]["text"] == reference.greedy(ids, 12)


def test_the_openai_client_gets_an_answer(openai: OpenAI, real: Stack) -> None:
    answer = openai.chat.completions.create(
        model=real.model, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert [m.id for m in openai.models.list()] == [real.model]


def test_a_stream_begins_with_the_role_and_has_a_chunk_per_token(openai: OpenAI, real: Stack) -> None:
    stream = openai.chat.completions.create(
        model=real.model,
        messages=[{"role": "user", "content": "Count from 1 to 5."}],
        max_tokens=24,
        temperature=0,
        stream=True,
        logit_bias=LONG,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert 20 <= len(texts) <= 24, "about one chunk per token while the service has nothing else to do"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    plain = real.chat("Count from 1 to 5.", max_tokens=24, logit_bias=LONG)
    assert "".join(texts) == plain["choices"][0]["message"]["content"]


def test_a_stream_ends_with_done(real: Stack) -> None:
    body = real.chat_body(max_tokens=3, stream=True)
    raw = real.client.post("/v1/chat/completions", json=body).content
    assert raw.endswith(b"data: [DONE]\n\n")
    assert raw.count(b"[DONE]") == 1


def test_eight_requests_share_one_batch(real: Stack) -> None:
    def ask(number: int) -> str:
        answer = real.chat(f"{number}+{number}=?", max_tokens=16, logit_bias=LONG)
        assert answer["usage"]["completion_tokens"] == 16
        text: str = answer["choices"][0]["message"]["content"]
        return text

    alone = [ask(number) for number in range(8)]
    before = real.metric("scheduler-0", "millrace_steps_total")
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    steps = real.metric("scheduler-0", "millrace_steps_total") - before
    assert together == alone
    assert steps < 8 * 16 / 2, "eight requests of 16 tokens took as many steps as one after the other"


def test_a_client_that_walks_away_frees_its_slot_and_pages(real: Stack) -> None:
    eventually(lambda: real.running() == 0, "nothing runs")
    body = real.complete_body("Tell me a long story.", max_tokens=4000, logit_bias=LONG)
    with real.streaming("/v1/completions", body) as events:
        for _ in range(4):
            next(events)
        assert real.running() == 1
        assert real.metric("scheduler-0", "millrace_kv_pages", state="live") > 0
    eventually(lambda: real.running() == 0, "the slot is free")
    assert real.metric("scheduler-0", "millrace_kv_pages", state="live") == 0
    assert real.complete("1 + 1 =", max_tokens=4)["choices"][0]["text"]


def test_the_line_that_the_launcher_prints_works(real: Stack) -> None:
    port = real.ports()["api-0"]
    assert real.announced[0] == f"Millrace is ready: http://127.0.0.1:{port}/v1 (model smollm2-135m-instruct)"
    answer = subprocess.run(
        [*shlex.split(real.announced[1]), "-s"], capture_output=True, timeout=60, check=True, text=True
    )
    assert " 4" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
