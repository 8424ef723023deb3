"""What is in an answer: where it ends, what it counts, which characters it has, how it is steered."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.stack import Json, Stack, finish_of, text_of
from tests.e2e.test_wire_form import CHAT, COMPLETIONS, HELLO, LONG, error_of

EMOJI = "\U0001f642"
COPY = "one two three four five six seven eight nine ten " * 5 + "one two"
COPIED = " three four five six seven eight nine ten one two three four"


def both_ways(stack: Stack, path: str, body: Json) -> tuple[str, str, Json]:
    """Ask for an answer whole and as a stream, which must agree; gives text, finish reason and usage."""
    whole = stack.client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    chunks = stack.stream(path, {**body, "stream_options": {"include_usage": True}})
    assert text_of(chunks) == text
    assert finish_of(chunks) == choice["finish_reason"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][count] == answer["usage"][count]
    return text, choice["finish_reason"], answer["usage"]


@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_max_tokens_is_exact(real: Stack, num_tokens: int) -> None:
    text, finish, usage = both_ways(real, CHAT, real.chat_body(max_tokens=num_tokens, logit_bias=HELLO))
    assert (text, finish) == ("Hello" * num_tokens, "length")
    assert usage["completion_tokens"] == num_tokens
    assert usage["total_tokens"] == 31 + num_tokens


def test_an_answer_that_ends_at_once_is_empty(real: Stack) -> None:
    for path, body in ((CHAT, real.chat_body()), (COMPLETIONS, real.complete_body("hi"))):
        text, finish, usage = both_ways(real, path, {**body, "max_tokens": 10, "logit_bias": {"2": 100}})
        assert (text, finish) == ("", "stop")
        assert usage["completion_tokens"] in (0, 1)


def test_the_model_ends_by_itself(real: Stack) -> None:
    text, finish, _ = both_ways(real, CHAT, real.chat_body(max_tokens=200))
    assert (text, finish) == ("Hello there! How can I assist you today?", "stop")


@pytest.mark.parametrize(
    ("stop", "text", "finish", "num_tokens"),
    [
        (["oHe"], "Hell", "stop", 2),
        ("oHe", "Hell", "stop", 2),
        (["zzz", "qqq", "oHe", "yyy"], "Hell", "stop", 2),
        (["oHelloHelloHe"], "Hell", "stop", 4),
        (["loX"], "Hello" * 10, "length", 10),
        (["Hello" * 10 + "!"], "Hello" * 10, "length", 10),
        ([], "Hello" * 10, "length", 10),
        (None, "Hello" * 10, "length", 10),
    ],
)
def test_stop_strings(real: Stack, stop: Any, text: str, finish: str, num_tokens: int) -> None:
    got, reason, usage = both_ways(real, CHAT, real.chat_body(max_tokens=10, logit_bias=HELLO, stop=stop))
    assert (got, reason, usage["completion_tokens"]) == (text, finish, num_tokens)


def test_a_stop_string_ends_the_engine_too(real: Stack) -> None:
    before = real.metric("scheduler-0", "millrace_generated_tokens_total")
    assert real.chat(max_tokens=4000, logit_bias=HELLO, stop=["oHe"])["choices"][0]["message"]["content"] == "Hell"
    assert real.metric("scheduler-0", "millrace_generated_tokens_total") - before < 400


@pytest.mark.parametrize("stop", [[1, 2], {"a": 1}, 3.5, ["a"] * 17])
def test_a_bad_stop_is_refused(real: Stack, stop: Any) -> None:
    response = real.client.post(CHAT, json=real.chat_body(max_tokens=3, stop=stop))
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("stop")


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "bias", "text"),
    [
        (EMOJI * 8, 8, {"10813": 100, "38887": 100}, EMOJI * 4),
        ("\U0001f600" * 8, 9, {"10813": 100, "242": 100, "218": 100}, "\U0001f600" * 3),
        ("e\u0301" * 16, 9, {}, "e\u0301" * 3),
        ("日本語" * 8, 12, {}, "日本語" * 2),
        ("안녕하세요" * 6, 14, {}, "안녕하세요"),
    ],
)
def test_characters_of_several_tokens_arrive_whole(
    real: Stack, prompt: str, num_tokens: int, bias: Json, text: str
) -> None:
    body = real.complete_body(prompt, max_tokens=num_tokens, logit_bias=bias)
    assert both_ways(real, COMPLETIONS, body)[:2] == (text, "length")
    pieces = [c["text"] for chunk in real.stream(COMPLETIONS, body) for c in chunk["choices"]]
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(("token", "text"), [("15876", " hi"), ("198", "\n")])
def test_blanks_stay(real: Stack, token: str, text: str) -> None:
    assert both_ways(real, CHAT, real.chat_body(max_tokens=3, logit_bias={token: 100}))[0] == text * 3


def test_control_tokens_are_no_text(real: Stack) -> None:
    text, finish, usage = both_ways(real, CHAT, real.chat_body(max_tokens=5, logit_bias={"1": 100}))
    assert (text, finish, usage["completion_tokens"]) == ("", "length", 5)


def test_logprobs_tell_the_bytes_of_half_characters(real: Stack) -> None:
    answer = real.chat(max_tokens=2, logit_bias={"10813": 100}, logprobs=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[240, 159], [240, 159]]


def test_logprobs_end_where_the_text_was_cut(real: Stack) -> None:
    answer = real.chat(max_tokens=5, logit_bias=HELLO, stop=["oHe"], logprobs=True, top_logprobs=2)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert 1 <= len(entries) <= 2
    assert {entry["token"] for entry in entries} == {"Hello"}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-10},
        {"temperature": 5e-324},
        {"temperature": 2, "top_p": 0},
        {"temperature": 2, "top_p": 1e-45},
        {"temperature": 2, "top_k": 1},
    ],
)
def test_a_vanishing_choice_is_the_likeliest_token(real: Stack, fields: Json) -> None:
    answer = real.complete("The capital of France is", max_tokens=1, **fields)
    assert answer["choices"][0]["text"] == " Paris"


def test_penalties_have_an_effect(real: Stack) -> None:
    prompt = "no, no, no, no, no, no, no,"
    plain = real.complete(prompt, max_tokens=10)["choices"][0]["text"]
    assert plain == " no, no, no, no, no,"
    for fields in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}):
        answer = real.complete(prompt, max_tokens=10, logit_bias=LONG, **fields)
        assert answer["choices"][0]["text"].count(" no") < 5


def test_neighbours_in_a_batch_do_not_mix(real: Stack) -> None:
    def ask(fields: Json) -> str:
        text: str = real.complete(**fields)["choices"][0]["text"]
        return text

    penalty = {"prompt": "no, no, no, no,", "max_tokens": 30, "frequency_penalty": 2, "logit_bias": LONG}
    copy = {"prompt": COPY, "max_tokens": 12}
    forced = {"prompt": COPY, "max_tokens": 12, "logit_bias": HELLO}
    requests = [copy, penalty, forced] * 4
    with ThreadPoolExecutor(len(requests)) as pool:
        texts = list(pool.map(ask, requests))
    assert set(texts[0::3]) == {COPIED}
    assert len(set(texts[1::3])) == 1
    assert set(texts[2::3]) == {"Hello" * 12}


def test_a_seed_fixes_the_answer_alone_and_in_company(real: Stack) -> None:
    def ask(seed: int) -> str:
        text: str = real.complete("Once upon a time", max_tokens=16, temperature=1.0, seed=seed)["choices"][0]["text"]
        return text

    alone = {seed: ask(seed) for seed in (1, 2, 3)}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor(9) as pool:
        for seed, text in zip([1, 2, 3] * 3, pool.map(ask, [1, 2, 3] * 3), strict=True):
            assert text == alone[seed]


def test_n_choices_count_the_prompt_once(real: Stack) -> None:
    answer = real.chat(n=3, max_tokens=5, temperature=1.0, seed=7, logit_bias=LONG)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["prompt_tokens"] == 31
    assert answer["usage"]["completion_tokens"] == 15


def test_prompts_of_a_list_are_answered_in_order(real: Stack) -> None:
    prompts = ["The capital of France is", "The capital of Italy is", "The capital of Germany is"]
    answer = real.complete(prompts, max_tokens=1)
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda c: c["index"])]
    assert texts == [real.complete(prompt, max_tokens=1)["choices"][0]["text"] for prompt in prompts]


@pytest.mark.parametrize(
    ("text", "prompt_tokens"), [("hi", 31), ("Say hello.", 33), ("Count from 1 to 5.", 38), ("", 30)]
)
def test_the_chat_template_adds_nothing_twice(real: Stack, text: str, prompt_tokens: int) -> None:
    assert real.chat(text, max_tokens=1)["usage"]["prompt_tokens"] == prompt_tokens


def test_the_developer_speaks_as_the_system(real: Stack) -> None:
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "You are helpful."}, {"role": "user", "content": "hi"}]
        assert real.chat(messages=messages, max_tokens=1)["usage"]["prompt_tokens"] == 19


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": " hello" * 9000}], "max_tokens": 5},
        {"max_tokens": 8192 - 30},
    ],
)
def test_what_does_not_fit_the_context_is_refused(real: Stack, fields: Json) -> None:
    response = real.client.post(CHAT, json={**real.chat_body(), **fields})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert re.search(r"8192", error["message"])


@pytest.mark.parametrize("max_tokens", [0, -1, -(2**31) - 1, 10**9, 1.5, "ten"])
def test_impossible_lengths_are_refused(real: Stack, max_tokens: Any) -> None:
    response = real.client.post(CHAT, json=real.chat_body(max_tokens=max_tokens))
    assert response.status_code == 400
    error_of(response)


def test_defaults_of_length(real: Stack) -> None:
    answer = real.complete("hi", logit_bias=HELLO)
    assert answer["choices"][0]["text"] == "Hello" * 16
    stop = "Hello" * 20
    answer = real.chat(logit_bias=HELLO, stop=[stop])
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 20)
    assert real.chat(max_completion_tokens=5, logit_bias=HELLO)["choices"][0]["message"]["content"] == "Hello" * 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("top_p", []),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 3),
        ("logit_bias", {"49152": 5}),
        ("logit_bias", {"-1": 5}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [1, 2]),
        ("n", 0),
        ("n", 100000),
        ("seed", 2**64),
        ("messages", [{"role": "wizard", "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": None}]),
    ],
)
def test_bad_values_are_refused_by_name(real: Stack, name: str, value: Any) -> None:
    response = real.client.post(CHAT, json={**real.chat_body(max_tokens=1), name: value})
    assert response.status_code == 400
    assert (error_of(response)["param"] or "").startswith(name)


@pytest.mark.parametrize("prompt", [[], [[]], [[], [504]], [[49152]], 5])
def test_prompts_that_are_none_are_refused(real: Stack, prompt: Any) -> None:
    response = real.client.post(COMPLETIONS, json=real.complete_body(prompt, max_tokens=1))
    assert response.status_code == 400
    error_of(response)
