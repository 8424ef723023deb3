"""Prompts of every kind at once through two tokenizers: no error, and every count is that of the prompt alone."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.model_files import EMBEDDED_NAME
from tests.e2e.stack import Json, Stack
from tests.e2e.test_tokenizing import TOKENIZE
from tests.e2e.test_wire_form import CHAT, COMPLETIONS


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two tokenizers with the embedded vocabulary, before an engine that needs no weights."""
    flags = ("--model", EMBEDDED_NAME, "--engine", "fake", "--fake-step-ms", "0", "--tokenizers", "2")
    stack = Stack(tmp_path_factory.mktemp("crowded"), *flags)
    try:
        yield stack
    finally:
        stack.close()


def test_prompts_side_by_side_are_encoded_as_alone(crowded: Stack) -> None:
    rng = random.Random(3)
    asked: list[tuple[str, Json, int]] = []
    for number in range(200):
        length = rng.choice([1, 2, 30, 700, 3000])
        hello = " hello" * length
        asked.append(
            [
                (CHAT, crowded.chat_body("hi", max_tokens=1), 31),
                (CHAT, crowded.chat_body(hello, max_tokens=1), length + 30),
                (COMPLETIONS, crowded.complete_body(hello, max_tokens=1), length),
                (COMPLETIONS, crowded.complete_body([hello, " hello", hello], max_tokens=1), 2 * length + 1),
                (COMPLETIONS, crowded.complete_body([504] * length, max_tokens=1), length),
                (TOKENIZE, {"prompt": hello}, length),
            ][number % 6]
        )
    rng.shuffle(asked)

    def ask(path: str, body: Json) -> int:
        response = crowded.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        return int(answer["count"] if path == TOKENIZE else answer["usage"]["prompt_tokens"])

    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda each: ask(each[0], each[1]), asked))
    assert found == [expected for _, _, expected in asked]
