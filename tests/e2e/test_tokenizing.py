"""Ids of a text and text of ids, through the stack: as generation counts them, and whatever dies meanwhile."""

import signal
import threading
from typing import Any

import httpx
import pytest

from tests.e2e.stack import Json, Stack
from tests.waiting import eventually

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MESSAGES: list[Json] = [{"role": "user", "content": "hi"}]


def ask(stack: Stack, path: str, **body: Any) -> Json:
    response = stack.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def test_a_text_has_the_ids_that_a_completion_counts(real: Stack) -> None:
    told = ask(real, TOKENIZE, model=real.model, prompt=" hello" * 5, return_token_strs=True)
    usage = real.complete(" hello" * 5, max_tokens=1)["usage"]
    assert told["count"] == len(told["tokens"]) == usage["prompt_tokens"] == 5
    assert told["token_strs"] == [" hello"] * 5
    assert told["max_model_len"] == 8192
    assert ask(real, DETOKENIZE, model=real.model, tokens=told["tokens"]) == {"prompt": " hello" * 5}
    by_ids = real.complete(told["tokens"], max_tokens=3)
    assert by_ids["choices"] == real.complete(" hello" * 5, max_tokens=3)["choices"]


def test_a_conversation_has_the_ids_that_a_chat_counts(real: Stack) -> None:
    told = ask(real, TOKENIZE, messages=MESSAGES)
    assert told["count"] == real.chat(max_tokens=1)["usage"]["prompt_tokens"] == 31
    assert told["token_strs"] is None
    text = ask(real, DETOKENIZE, tokens=told["tokens"])["prompt"]
    assert "<|im_start|>user\nhi<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert ask(real, TOKENIZE, prompt=text)["tokens"] == told["tokens"]
    shorter = ask(real, TOKENIZE, messages=MESSAGES, add_generation_prompt=False)
    assert 0 < shorter["count"] < told["count"]


def test_nothing_has_no_ids_and_much_has_many(real: Stack) -> None:
    assert ask(real, TOKENIZE, prompt="")["tokens"] == []
    assert ask(real, DETOKENIZE, tokens=[])["prompt"] == ""
    assert ask(real, TOKENIZE, prompt=" hello" * 100_000)["count"] == 100_000
    assert ask(real, TOKENIZE, prompt="\U0001f642\x00\r\n")["count"] > 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TOKENIZE, {}, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": MESSAGES}, "prompt"),
        (TOKENIZE, {"prompt": ["a"]}, "prompt"),
        (TOKENIZE, {"messages": []}, "messages"),
        (TOKENIZE, {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        (TOKENIZE, {"prompt": "a", "max_tokens": 1}, "max_tokens"),
        (DETOKENIZE, {}, "tokens"),
        (DETOKENIZE, {"tokens": "a"}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [2**64]}, "tokens[0]"),
        (DETOKENIZE, {"tokens": [49152]}, "tokens"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(real: Stack, path: str, body: Json, param: str) -> None:
    response = real.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_the_rest_of_a_request_holds_here_too(real: Stack) -> None:
    assert real.client.post(TOKENIZE, json={"prompt": "a", "model": "no-such"}).status_code == 404
    assert real.client.post(TOKENIZE, json={"prompt": "a" * (1 << 20)}).status_code == 413
    assert real.client.get(TOKENIZE).status_code == 405
    late = real.client.post(TOKENIZE, json={"prompt": "a"}, headers={"X-Request-Timeout": "0.000001"})
    assert late.status_code == 504
    answer = real.client.post(TOKENIZE, json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


def test_tokenizers_may_die_meanwhile(fake: Stack) -> None:
    """Every answer comes, and none is wrong, while the tokenizer is killed again and again."""
    fake.wait_ready()
    want = ask(fake, TOKENIZE, prompt="some words of a mill")
    stop, wrong, count = threading.Event(), [], [0]

    def keep_asking() -> None:
        with httpx.Client(base_url=fake.url, timeout=60) as client:
            while not stop.is_set():
                response = client.post(TOKENIZE, json={"prompt": "some words of a mill"})
                count[0] += 1
                if response.status_code != 200 or response.json() != want:
                    wrong.append(response.text)

    threads = [threading.Thread(target=keep_asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        before = count[0]
        eventually(lambda before=before: count[0] > before + 5, "answers come")
        fake.kill("tokenizer-0", signal.SIGKILL)
    before = count[0]
    eventually(lambda: count[0] > before + 5, "answers come again")
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong
