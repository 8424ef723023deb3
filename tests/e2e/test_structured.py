"""Structured answers and scored prompts of the real model, through the whole stack."""

import json
import math
from typing import Any

import pytest

from tests.e2e.conftest import Reference
from tests.e2e.stack import Json, Stack, finish_of, text_of
from tests.e2e.test_wire_form import CHAT, COMPLETIONS, LONG

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["person", "robot"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
CAPITAL = "The capital of France is"


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age", "kind"} and 0 <= value["age"] <= 120 and value["kind"] in ("person", "robot")


def ask(stack: Stack, **fields: Any) -> Json:
    answer = stack.client.post(CHAT, json=stack.chat_body("Describe somebody.", **{"max_tokens": 80, **fields}))
    assert answer.status_code == 200, answer.text
    body: Json = answer.json()
    return body


def test_a_schema_holds_whole_streamed_and_with_logprobs(real: Stack) -> None:
    whole = ask(real, response_format=FORMAT, logprobs=True, top_logprobs=2)["choices"][0]
    text = whole["message"]["content"]
    assert is_person(text) and whole["finish_reason"] == "stop"
    assert "".join(entry["token"] for entry in whole["logprobs"]["content"]) == text
    body = real.chat_body("Describe somebody.", max_tokens=80, response_format=FORMAT)
    chunks = real.stream(CHAT, body)
    assert (text_of(chunks), finish_of(chunks)) == (text, "stop")


def test_choices_and_seeds(real: Stack) -> None:
    fields = {"response_format": FORMAT, "n": 3, "temperature": 1.0, "seed": 4}
    first, again = ([choice["message"]["content"] for choice in ask(real, **fields)["choices"]] for _ in range(2))
    assert first == again and len(set(first)) > 1
    assert all(map(is_person, first))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"regex": r"\d{3}-\d{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "(ab)+!"}, "max_tokens": 400}, "(ab)+!?.*"),
        ({"ebnf": 'root ::= "left" | "right"'}, "left|right"),
    ],
)
def test_other_grammars(real: Stack, fields: Json, expected: str) -> None:
    import re

    text = ask(real, **fields)["choices"][0]["message"]["content"]
    assert re.fullmatch(expected, text), text


def test_any_object(real: Stack) -> None:
    choice = ask(real, response_format={"type": "json_object"}, max_tokens=200)["choices"][0]
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].startswith("{")


def test_a_bad_grammar_is_refused_before_a_stream_begins(real: Stack) -> None:
    answer = real.client.post(CHAT, json=real.chat_body(regex="(", stream=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "regex"


def score(stack: Stack, max_tokens: int, **fields: Any) -> Json:
    body = stack.complete_body(CAPITAL, echo=True, logprobs=2, max_tokens=max_tokens, **fields)
    answer = stack.client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    parsed: Json = answer.json()
    return parsed


def test_scores_of_a_prompt_equal_those_of_transformers(real: Stack, reference: Reference) -> None:
    import torch

    ids = reference.tokenizer(CAPITAL)["input_ids"]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([ids])).logits[0].float()
    expected = torch.log_softmax(logits, -1)
    for _ in range(2):
        answer = score(real, 0)
        found = answer["choices"][0]["logprobs"]
        assert answer["choices"][0]["text"] == CAPITAL
        assert found["text_offset"] == [0, 3, 11, 14, 21]
        assert found["token_logprobs"][0] is None
        for i, value in enumerate(found["token_logprobs"][1:]):
            assert math.isclose(value, float(expected[i, ids[i + 1]]), abs_tol=1e-4), i
            best = float(expected[i].max())
            assert math.isclose(max(found["top_logprobs"][i + 1].values()), best, abs_tol=1e-4)


def test_echo_streams_what_it_answers_whole(real: Stack) -> None:
    choice = score(real, 3, logit_bias=LONG)["choices"][0]
    body = real.complete_body(CAPITAL, echo=True, logprobs=2, max_tokens=3, logit_bias=LONG)
    chunks = real.stream(COMPLETIONS, body)
    assert text_of(chunks) == choice["text"]
    tokens = [t for c in chunks for one in c["choices"] for t in (one["logprobs"] or {}).get("tokens", [])]
    assert tokens == choice["logprobs"]["tokens"]


def test_the_fake_engine_obeys_grammars_too(fake: Stack) -> None:
    choice = ask(fake, response_format=FORMAT, max_tokens=300)["choices"][0]
    assert is_person(choice["message"]["content"]) and choice["finish_reason"] == "stop"
