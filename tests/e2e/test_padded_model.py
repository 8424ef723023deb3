"""A model with more rows than its tokenizer has tokens, as many have: what lies behind the last token is no text."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.stack import Stack, finish_of, text_of
from tests.e2e.test_wire_form import COMPLETIONS, error_of
from tests.engine.conftest import VOCAB, write_checkpoint
from tests.shared.tiny_models import byte_level_tokenizer

NUM_TOKENS = byte_level_tokenizer().get_vocab_size()
"""Of the tokenizer; the model has VOCAB rows."""


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A tiny random model, which draws any of its rows when it is hot."""
    folder = write_checkpoint(tmp_path_factory.mktemp("padded"), "qwen2", eos_token_id=1, bos_token_id=0)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    stack = Stack(tmp_path_factory.mktemp("run"), "--model", str(folder), "--threads", "1")
    try:
        yield stack
    finally:
        stack.close()


def test_rows_behind_the_vocabulary_are_no_text(padded: Stack) -> None:
    assert NUM_TOKENS < VOCAB
    body = {"max_tokens": 480, "n": 4, "temperature": 2.0, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    answer = padded.complete("hello", **body)
    drawn = [choice["token_ids"] for choice in answer["choices"]]
    assert sum(len(ids) for ids in drawn) == 1920 == answer["usage"]["completion_tokens"]
    assert max(max(ids) for ids in drawn) >= NUM_TOKENS, "the test is empty: only tokens were drawn"
    tokenizer = byte_level_tokenizer()
    for ids, choice in zip(drawn, answer["choices"], strict=True):
        known = [i for i in ids if i < NUM_TOKENS]
        assert choice["text"] == tokenizer.decode(known, skip_special_tokens=True)


def test_an_answer_of_nothing_else_is_empty(padded: Stack) -> None:
    banned = {str(i): -100 for i in range(NUM_TOKENS)}
    chunks = padded.stream(COMPLETIONS, padded.complete_body("hello", max_tokens=5, logprobs=2, logit_bias=banned))
    assert (text_of(chunks), finish_of(chunks)) == ("", "length")


@pytest.mark.parametrize("token", [NUM_TOKENS, VOCAB - 1, VOCAB])
def test_rows_behind_the_vocabulary_are_refused(padded: Stack, token: int) -> None:
    for fields in ({"logit_bias": {str(token): 100}}, {"prompt": [token]}, {"stop_token_ids": [token]}):
        response = padded.client.post(COMPLETIONS, json={**padded.complete_body("hello", max_tokens=2), **fields})
        assert response.status_code == 400, (fields, response.text)
        error_of(response)
    assert padded.complete("hello", max_tokens=2)["usage"]["completion_tokens"] == 2
