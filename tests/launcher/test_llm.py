"""The offline API around the fake engine (which is quick), and around the embedded model."""

from collections.abc import Iterator

import pytest

from services.launcher.llm import LLM, SamplingParams
from shared.errors import ConfigError, InvalidRequest, MillraceError
from shared.sampling import Grammar
from tests.scheduler.driver import is_idle


@pytest.fixture(scope="module")
def fake() -> Iterator[LLM]:
    with LLM("bytes", engine="fake", fake_step_ms=0.0, max_running_requests=4, num_pages=64, fake_eos_every=0) as llm:
        yield llm


@pytest.fixture(scope="module")
def real() -> Iterator[LLM]:
    with LLM(dtype="float32", max_running_requests=4, threads=1) as llm:
        yield llm


GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def test_answers_come_in_the_order_of_the_prompts(fake: LLM) -> None:
    prompts = [f"prompt {n}" for n in range(20)]
    lengths = [1 + 7 * n % 20 for n in range(20)]
    params = [SamplingParams(max_tokens=length, seed=n) for n, length in enumerate(lengths)]
    answers = fake.generate(prompts, params)
    assert [len(answer.token_ids) for answer in answers] == lengths
    assert [bytes(answer.prompt_ids).decode() for answer in answers] == prompts
    assert {answer.finish_reason for answer in answers} == {"length"}
    for prompt, one, answer in zip(prompts, params, answers, strict=True):
        assert fake.generate(prompt, one)[0].token_ids == answer.token_ids


def test_one_prompt_is_a_text_or_ids(fake: LLM) -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    by_text, by_ids = fake.generate("hello", params), fake.generate(list(b"hello"), params)
    assert len(by_text) == len(by_ids) == 1
    assert by_text[0].text == by_ids[0].text
    both = fake.generate(["hello", list(b"hello")], params)
    assert [answer.text for answer in both] == [by_text[0].text] * 2


def test_the_longest_begin_first(fake: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    add = fake._scheduler.add
    monkeypatch.setattr(
        fake._scheduler, "add", lambda arrival: (begun.append(arrival.request.prompt_ids[0]), add(arrival))
    )
    fake.generate([[1], [2], [3]], [SamplingParams(max_tokens=n) for n in (3, 9, 5)])
    assert begun == [2, 3, 1]


def test_usage_tells_what_the_cache_had(fake: LLM) -> None:
    prompt = list(range(65, 65 + 50))
    fake.generate(prompt, SamplingParams(max_tokens=2))
    usage = fake.generate(prompt, SamplingParams(max_tokens=2))[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (50, 2, 48)


def test_without_a_seed_each_answer_is_drawn_anew(fake: LLM) -> None:
    answers = fake.generate(["same"] * 4, SamplingParams(max_tokens=16))
    assert len({answer.text for answer in answers}) == 4


def test_more_prompts_than_pages_all_get_their_answers(fake: LLM) -> None:
    answers = fake.generate(["x" * 200] * 12, SamplingParams(max_tokens=300, seed=3))
    assert {len(answer.token_ids) for answer in answers} == {300}
    assert is_idle(fake._scheduler)
    fake._scheduler.check()


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (["a"], SamplingParams(temperature=9.0), "temperature is 9.0"),
        (["a"], SamplingParams(max_tokens=0), "max_tokens is 0"),
        (["a"], SamplingParams(stop=[str(n) for n in range(17)]), "16 texts"),
        (["a", "b"], [SamplingParams()], "2 prompts cannot use 1"),
        (["a", [5000]], None, "prompt 1: token id 5000"),
        (["a" * 100_000], None, "prompt 0: .*maximum context length"),
        (["a"], SamplingParams(stop=5), "stop: Expected `str | array`, got `int`"),  # type: ignore[arg-type]
        (["a"], SamplingParams(max_tokens="5"), "max_tokens: Expected `int"),  # type: ignore[arg-type]
        (["a"], {"max_tokens": 5}, "params: must be SamplingParams"),
        ([None], None, "prompts: each must be a text"),
        ([[1, "a"]], None, "prompts: each must be a text"),
        (5, None, "prompts: each must be a text"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    fake: LLM, prompts: list[str], params: SamplingParams, words: str
) -> None:
    steps = fake._loop.stats.steps
    with pytest.raises(InvalidRequest, match=words):
        fake.generate(prompts, params)
    assert fake._loop.stats.steps == steps


def test_an_unknown_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="num_pagse"):
        LLM("bytes", engine="fake", num_pagse=3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_pages": -1}, "^num_pages: '-1': Input"),
        ({"model": 5, "dtype": "float99"}, "^model: '5': .*; dtype: 'float99': Input"),
        ({"tp": 2}, "^tp: the fake engine"),
        ({}, "^MILLRACE_DTYPE: 'float98': Input"),
    ],
)
def test_a_bad_argument_is_called_by_its_name(
    flags: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flags:
        monkeypatch.setenv("MILLRACE_DTYPE", "float98")
    with pytest.raises(ConfigError, match=words):
        LLM(**{"engine": "fake", **flags})  # type: ignore[arg-type]


def test_an_answer_without_parameters_is_short(fake: LLM) -> None:
    answers = fake.generate(["", "a"])
    assert [len(answer.token_ids) for answer in answers] == [16, 16]
    with LLM("bytes", engine="fake", fake_step_ms=0.0, max_seq_len=100) as small:
        assert len(small.generate("a" * 60, SamplingParams(max_tokens=None))[0].token_ids) == 40


def test_a_text_is_a_conversation_of_one_message(fake: LLM) -> None:
    for given in ("hi", ["hi"], [{"role": "user", "content": "hi"}]):
        (answer,) = fake.chat(given, SamplingParams(max_tokens=2, seed=1))
        (same,) = fake.chat([[{"role": "user", "content": "hi"}]], SamplingParams(max_tokens=2, seed=1))
        assert (answer.prompt_ids, answer.token_ids) == (same.prompt_ids, same.token_ids)
    for bad in (5, {"role": "user"}, [["hi"]], [None]):
        with pytest.raises(InvalidRequest, match="conversations: each must be a text or a list of messages"):
            fake.chat(bad)  # type: ignore[arg-type]


def test_an_interrupt_leaves_nothing_behind(fake: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = fake._scheduler.settle

    def interrupted(*args: object) -> object:
        monkeypatch.undo()
        settle(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(fake._scheduler, "settle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fake.generate(["a", "b"], SamplingParams(max_tokens=50))
    assert is_idle(fake._scheduler)
    fake._scheduler.check()
    assert len(fake.generate("again", SamplingParams(max_tokens=7))[0].token_ids) == 7


def test_a_grammar_that_is_none_fails_its_answer_alone(fake: LLM) -> None:
    bad = SamplingParams(max_tokens=5, grammar=Grammar("regex", "("))
    answers = fake.generate(["a", "b"], [bad, SamplingParams(max_tokens=5)])
    assert answers[0].error is not None and answers[0].finish_reason is None
    assert answers[1].error is None and len(answers[1].token_ids) == 5


def test_a_closed_model_says_so() -> None:
    llm = LLM("bytes", engine="fake")
    llm.close()
    with pytest.raises(MillraceError):
        llm.generate("a", SamplingParams(max_tokens=1))


def test_the_model_answers(real: LLM) -> None:
    first, second = real.generate(["The capital of France is", [504, 3575, 282, 4649, 314]], GREEDY)
    assert first.text == second.text
    assert first.text.startswith(" Paris")
    assert first.finish_reason == "length" and first.usage.completion_tokens == 12


def test_an_end_token_counts_and_is_not_printed(real: LLM) -> None:
    answer = real.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=60))[0]
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] in real.limits.eos_token_ids
    assert answer.text == real._texts.vocabulary.decode(answer.token_ids[:-1])


def test_a_stop_string_ends_an_answer_where_it_is_complete(real: LLM) -> None:
    whole = real.generate("The capital of France is", GREEDY)[0]
    cut, kept = real.generate(
        ["The capital of France is"] * 2,
        [SamplingParams(temperature=0.0, max_tokens=12, stop="answer", include_stop=keep) for keep in (False, True)],
    )
    before = whole.text[: whole.text.index("answer")]
    assert (cut.text, kept.text) == (before, before + "answer")
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_log_probabilities_come_with_the_tokens(real: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    answer = real.generate([504, 3575, 282, 4649, 314], params)[0]
    assert answer.logprobs is not None and len(answer.logprobs) == 4
    assert answer.logprobs[0].top_ids[0] == answer.token_ids[0]
    assert answer.prompt_logprobs is not None
    assert sum(len(piece.logprobs) for piece in answer.prompt_logprobs) == 4


def test_a_conversation_is_answered(real: LLM) -> None:
    answer = real.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)[0]
    assert "Paris" in answer.text
    assert len(real.chat([[{"role": "user", "content": "hi"}]] * 3, GREEDY)) == 3
