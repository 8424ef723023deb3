from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.encode import Encoded, PromptEncoder, weigh
from shared.errors import ContextLengthExceeded, InvalidRequest, RequestError
from shared.messages import Delta, TokenizeRequest
from shared.model_files import locate
from shared.vocab import load_vocabulary
from tests.shared.tiny_models import byte_level_tokenizer, write_folder
from tests.tokenizer.requests import chat, make_request

LIMIT = 8192


def make_encoder(model: str = "") -> PromptEncoder:
    files = locate(model)
    return PromptEncoder(load_vocabulary(files), ChatTemplate(files))


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return make_encoder()


def ids_of(encoder: PromptEncoder, request: TokenizeRequest, limit: int = LIMIT) -> list[list[int]]:
    answer = encoder.encode([request], limit)[0]
    assert isinstance(answer, Encoded), answer
    return [r.prompt_ids for r in answer.requests]


def error_of(encoder: PromptEncoder, request: TokenizeRequest, limit: int = LIMIT) -> RequestError:
    answer = encoder.encode([request], limit)[0]
    assert isinstance(answer, RequestError), answer
    return answer


def test_choices_follow_their_prompts_with_their_own_seeds(encoder: PromptEncoder) -> None:
    request = make_request("The capital", [504, 3575], n=2, tenant="t", priority=3, arrival_ms=7, cache_salt="s")
    answer = encoder.encode([request], LIMIT)[0]
    assert isinstance(answer, Encoded)
    assert [r.uid for r in answer.requests] == request.uids
    assert [r.prompt_ids for r in answer.requests] == [[504, 3575]] * 4
    assert [r.params.seed for r in answer.requests] == [100, 101, 102, 103]
    first = answer.requests[0]
    assert (first.tenant, first.priority, first.arrival_ms, first.cache_salt) == ("t", 3, 7, "s")
    assert answer.num_prompt_tokens == 8


def test_a_batch_keeps_each_answer_at_its_place(encoder: PromptEncoder) -> None:
    requests = [make_request("1234"), make_request([49152]), make_request(chat("hi")), make_request("", [])]
    answers = encoder.encode(requests, LIMIT)
    assert [type(a) for a in answers] == [Encoded, InvalidRequest, Encoded, InvalidRequest]
    assert [len(a.requests[0].prompt_ids) for a in answers if isinstance(a, Encoded)] == [4, 31]


@pytest.mark.parametrize(
    "ids",
    [[49152], [-1], [2**31], [2**64], [504, 49152], []],
    ids=["first beyond", "-1", "2^31", "2^64", "one", "none"],
)
def test_ids_outside_the_vocabulary_are_refused(encoder: PromptEncoder, ids: list[int]) -> None:
    error = error_of(encoder, make_request("hi", ids) if ids else make_request(ids))
    assert (error.status, error.param) == (400, "prompt")


@pytest.mark.parametrize("params", [{"logit_bias": {49152: 1.0}}, {"stop_token_ids": [60000]}])
def test_parameters_that_name_no_token_are_refused(encoder: PromptEncoder, params: dict[str, Any]) -> None:
    assert error_of(encoder, make_request("hi", params=params)).param in params


def test_token_ids_are_taken_as_they_are(encoder: PromptEncoder) -> None:
    odd = [33, 34, 1, 2, 0, 10813]
    assert ids_of(encoder, make_request(odd)) == [odd]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(" hello" * (LIMIT + 1)), "resulted in 8193 tokens"),
        (make_request(" hello" * LIMIT), "resulted in 8192 tokens"),
        (make_request(chat(" hello" * (LIMIT + 800))), "resulted in 9022 tokens"),
        (make_request("hi", " hello" * (LIMIT + 1)), "resulted in 8193 tokens"),
        (make_request([504] * LIMIT), "resulted in 8192 tokens"),
        (make_request("a" * 2_000_000), "resulted in more than 8192 tokens"),
        (make_request(chat("hi"), max_tokens=LIMIT - 30), "requested 8193 tokens (31 in the messages, 8162 in"),
        (make_request(" hello" * 100, max_tokens=LIMIT - 99), "requested 8193 tokens (100 in the prompt, 8093 in"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(
    encoder: PromptEncoder, request_: TokenizeRequest, message: str
) -> None:
    error = error_of(encoder, request_)
    assert isinstance(error, ContextLengthExceeded)
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "maximum context length is 8192 tokens" in error.message and message in error.message


def test_an_answer_without_a_limit_gets_the_room_that_is_left(encoder: PromptEncoder) -> None:
    rooms: list[int | None] = []
    for request in (
        make_request(chat("hi"), max_tokens=None),
        make_request(chat("hi"), max_tokens=LIMIT - 31),
        make_request(" hello" * (LIMIT - 1), max_tokens=None),
        make_request("hi", max_tokens=0),
    ):
        answer = encoder.encode([request], LIMIT)[0]
        assert isinstance(answer, Encoded)
        rooms.append(answer.requests[0].params.max_tokens)
    assert rooms == [LIMIT - 31, LIMIT - 31, 1, 0]
    assert error_of(encoder, make_request("hi", max_tokens=None, params={"min_tokens": LIMIT})).param == "min_tokens"


def test_a_default_limit_gives_way(encoder: PromptEncoder) -> None:
    for num, left in ((LIMIT - 7, 7), (LIMIT - 16, 16), (10, 16)):
        (answer,) = encoder.encode([make_request(" hello" * num, max_tokens=16, default_limit=True)], LIMIT)
        assert isinstance(answer, Encoded) and answer.requests[0].params.max_tokens == left
    full = make_request(" hello" * LIMIT, max_tokens=16, default_limit=True)
    assert error_of(encoder, full).code == "context_length_exceeded"


def test_prompts_without_a_token_start_a_document(encoder: PromptEncoder) -> None:
    assert ids_of(encoder, make_request("")) == [[0]]
    assert ids_of(encoder, make_request("\x04")) == [[0]]  # a character this vocabulary has no token for
    assert ids_of(encoder, make_request(" ")) == [[216]]
    assert len(ids_of(encoder, make_request("\x00"))[0]) == 1


def test_half_a_character_is_refused(encoder: PromptEncoder) -> None:
    for prompt in ("a\ud800", chat("a\udc00")):
        assert error_of(encoder, make_request(prompt)).status == 400


def test_every_prompt_begins_with_exactly_one_bos(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "m",
        tokenizer=byte_level_tokenizer(bos=True),
        tokenizer_config={"bos_token": "<s>"},
        template="{{ bos_token }}{{ messages[0].content }}",
    )
    encoder = make_encoder(str(folder))
    body = ids_of(encoder, make_request([0]))[0]
    for prompt in ("hello", "<s>hello", chat("hello")):
        ids = ids_of(encoder, make_request(prompt), 128)[0]
        assert ids[0] == 0 and ids.count(0) == 1 and len(ids) == 2
    assert body == [0]
    assert ids_of(encoder, make_request(""), 128) == [[0]]


def test_a_model_without_a_template_still_completes(tmp_path: Path) -> None:
    encoder = make_encoder(str(write_folder(tmp_path / "m", tokenizer=byte_level_tokenizer())))
    assert "no chat template" in error_of(encoder, make_request(chat("hi")), 128).message
    assert ids_of(encoder, make_request("hello"), 128)


def test_one_encoder_serves_many_threads(encoder: PromptEncoder) -> None:
    def work(k: int) -> bool:
        length = 1 + k * 37 % 3000
        found = ids_of(encoder, make_request(" hello" * length, "hi", [504] * 3))
        return [len(ids) for ids in found] == [length, 1, 3] and len(ids_of(encoder, make_request(chat("hi")))[0]) == 31

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_a_request_whose_choices_do_not_fit_is_our_fault(encoder: PromptEncoder) -> None:
    assert error_of(encoder, make_request("a", "b", n=2, uids=["1", "2", "3"])).status == 500


def told(encoder: PromptEncoder, *prompts: Any, **fields: Any) -> Delta:
    answer = encoder.encode([make_request(*prompts, **fields)], LIMIT)[0]
    assert isinstance(answer, Delta), answer
    assert answer.ends and not answer.token_ids
    return answer


def test_ids_of_a_text_are_those_that_would_be_generated_from(encoder: PromptEncoder) -> None:
    for prompt in ("Hello there!", "", chat("hi"), "\u4f60\u597d <|im_start|>"):
        delta = told(encoder, prompt, purpose="tokenize")
        ids = [entry.token_id for entry in delta.prompt]
        assert delta.prompt_tokens == len(ids)
        if ids:
            assert [ids] == ids_of(encoder, make_request(prompt))
        back = told(encoder, ids, purpose="detokenize")
        assert back.text == b"".join(entry.token for entry in delta.prompt).decode()
        assert back.text == prompt or not isinstance(prompt, str)


def test_ids_may_be_asked_of_a_text_beyond_the_context(encoder: PromptEncoder) -> None:
    assert told(encoder, " hello" * (LIMIT + 5), purpose="tokenize").prompt_tokens == LIMIT + 5


def test_ids_without_what_every_prompt_begins_with(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer=byte_level_tokenizer(bos=True), tokenizer_config={"bos_token": "<s>"})
    encoder = make_encoder(str(folder))
    with_bos = told(encoder, "hi", purpose="tokenize").prompt_tokens
    assert told(encoder, "hi", purpose="tokenize", add_special=False).prompt_tokens == with_bos - 1


def test_a_text_of_ids_that_are_none_is_refused(encoder: PromptEncoder) -> None:
    error = error_of(encoder, make_request([1, 10**6], purpose="detokenize"))
    assert isinstance(error, InvalidRequest) and error.param == "tokens"


def test_weight_counts_all_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}, {"role": "assistant", "content": None}]
    assert [weigh(make_request(p)) for p in ("abcd", [1, 2], chat("abc"), parts)] == [4, 0, 3, 3]
    assert weigh(make_request("ab", "cd")) == 4


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.integers(2, 60))
def test_prompt_and_answer_always_fit(encoder: PromptEncoder, text: str, limit: int) -> None:
    answer = encoder.encode([make_request(text, max_tokens=None)], limit)[0]
    if isinstance(answer, Encoded):
        (request,) = answer.requests
        assert request.prompt_ids and request.params.max_tokens is not None
        assert len(request.prompt_ids) + request.params.max_tokens == limit
    else:
        assert isinstance(answer, ContextLengthExceeded)
