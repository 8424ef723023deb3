"""Echoed prompts: their text, their log probabilities in the completions form, and their place in a stream."""

from typing import Any

import pytest

from services.api.logprobs import CompletionLogprobs
from shared.messages import GenerateRequest, LogprobEntry
from tests.api.conftest import RunningApi
from tests.api.engine_side import MODEL, Answer, EngineSide
from tests.api.test_chat import events

COMPLETIONS = "/v1/completions"


def entry(token: bytes, logprob: float = -1.0, *top: tuple[int, float, bytes]) -> LogprobEntry:
    return LogprobEntry(1, logprob, token, list(top))


def scored(*tokens: bytes) -> tuple[LogprobEntry, ...]:
    return (entry(tokens[0], 0.0), *(entry(token, -1.0, (9, -0.25, b"top")) for token in tokens[1:]))


def tell(engine: EngineSide, *prompt: LogprobEntry, pieces: tuple[str, ...] = (" w1", " w2")) -> None:
    def script(request: GenerateRequest) -> Answer:
        return Answer(list(pieces), logprobs=request.params.logprobs is not None, prompt=prompt)

    engine.script = script


def streamed(api: RunningApi, body: dict[str, Any]) -> tuple[dict[int, str], dict[int, dict[str, list[Any]]]]:
    """Text and lists of each choice, put together from a stream."""
    *chunks, done = events(api.post(COMPLETIONS, {**body, "stream": True}).content)
    assert done == "[DONE]"
    texts: dict[int, str] = {}
    lists: dict[int, dict[str, list[Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            for key, values in (choice["logprobs"] or {}).items():
                lists.setdefault(choice["index"], {}).setdefault(key, []).extend(values)
    return texts, lists


def test_scores_of_a_prompt_stand_before_those_of_its_answer(api: RunningApi, engine: EngineSide) -> None:
    tell(engine, *scored(b"The", b" cap", b"ital"))
    body = {"model": MODEL, "prompt": "The capital", "echo": True, "logprobs": 1, "max_tokens": 2}
    choice = api.post(COMPLETIONS, body).json()["choices"][0]
    assert choice["text"] == "The capital w1 w2"
    found = choice["logprobs"]
    assert found["tokens"] == ["The", " cap", "ital", " w1", " w2"]
    assert found["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5]
    assert found["text_offset"] == [0, 3, 7, 11, 14]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"top": -0.25, " cap": -1.0}
    texts, lists = streamed(api, body)
    assert texts == {0: choice["text"]} and lists == {0: found}
    params = engine.queued[0].params
    assert (params.prompt_logprobs, params.logprobs, params.returns_prompt) == (1, 1, False)


def test_scoring_alone_ends_without_a_token(api: RunningApi, engine: EngineSide) -> None:
    tell(engine, *scored(b"The", b" end"), pieces=())
    body = {"model": MODEL, "prompt": "The end", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = api.post(COMPLETIONS, body).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("The end", "length")
    assert choice["logprobs"]["tokens"] == ["The", " end"]
    assert answer["usage"]["completion_tokens"] == 0
    texts, lists = streamed(api, body)
    assert texts == {0: "The end"} and lists == {0: choice["logprobs"]}


def test_ids_are_echoed_as_the_text_that_comes_back(api: RunningApi, engine: EngineSide) -> None:
    tell(engine, entry(b"\xc3", 0.0), entry(b"\xa9", 0.0), entry(b" x", 0.0))
    body = {"model": MODEL, "prompt": [5, 6, 7], "echo": True, "max_tokens": 2, "n": 2}
    answer = api.post(COMPLETIONS, body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["\u00e9 x w1 w2"] * 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert streamed(api, body)[0] == {0: "\u00e9 x w1 w2", 1: "\u00e9 x w1 w2"}
    params = engine.queued[0].params
    assert params.returns_prompt and params.prompt_logprobs is None


def test_text_is_echoed_before_the_engine_says_anything(api: RunningApi, engine: EngineSide) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "echo": True, "max_tokens": 1, "stream": True}
    *chunks, _ = events(api.post(COMPLETIONS, body).content)
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks[:2]] == [(0, "a"), (1, "b")]
    assert not engine.queued[0].params.returns_prompt


@pytest.mark.parametrize(
    ("tokens", "text", "offsets", "answer_at"),
    [
        ([b"a", b"bc"], "abc", [0, 1], 3),
        ([b"<s>", b"a", b"bc"], "abc", [0, 0, 1], 3),
        ([b"<s>", b" The", b" x"], "The x", [0, 0, 3], 5),
        ([b"\xe2", b"\x82", b"\xac", b"!"], "\u20ac!", [0, 0, 0, 1], 2),
        ([b"a", b"\xe2"], "a\ufffd", [0, 1], 2),
    ],
)
def test_offsets_of_a_prompt(tokens: list[bytes], text: str, offsets: list[int], answer_at: int) -> None:
    form = CompletionLogprobs()
    assert form.take_prompt([entry(token) for token in tokens], text)["text_offset"] == offsets
    assert form.take([entry(b"z")])["text_offset"] == [answer_at]
