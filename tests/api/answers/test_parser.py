"""Answers taken apart: what each format holds, and that neither cuts nor nonsense change or lose anything."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.api.answers.parser import Answer, AnswerParser, Call, call_id, parse
from shared.dialect import Outline, Thoughts

THINK = Thoughts("<think>", "</think>")
BEGUN = Thoughts("<think>", "</think>", begun=True)
NAMES = ["f", "get_weather"]
HERMES = Outline("hermes", NAMES)
LLAMA = Outline("llama3", NAMES)
MISTRAL = Outline("mistral", NAMES)
FORMATS = [HERMES, LLAMA, MISTRAL]
PARIS = '{"city": "Paris"}'


def answer(outline: Outline, text: str) -> Answer:
    return parse(outline, text)[0]


def pieces(outline: Outline, cuts: list[str]) -> Answer:
    parser, found = AnswerParser(outline), Answer()
    for cut in cuts:
        found.add(parser.feed(cut))
    found.add(parser.finish())
    return found


W = ("get_weather", PARIS)


@pytest.mark.parametrize(
    ("outline", "text", "content", "calls"),
    [
        (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', "", [W]),
        (HERMES, f'On it.\n<tool_call>{{"name":"get_weather","parameters":{PARIS}}}</tool_call>\n', "On it.", [W]),
        (
            HERMES,
            f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> done',
            " done",
            [W, ("f", "{}")],
        ),
        (HERMES, f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>', "", [W]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>', "", [("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}', "", [("f", '{"a": "x\\u000ay"}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "}</tool_call>"', "", None),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call> a <b> c', " a <b> c", [("f", "{}")]),
        (HERMES, f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_', "", [W]),
        (LLAMA, f'{{"name": "get_weather", "parameters": {PARIS}}}', "", [W]),
        (LLAMA, f'\n{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}', "", [W]),
        (LLAMA, f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', "", [W]),
        (
            LLAMA,
            f'{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "f", "parameters": {{}}}}',
            "",
            [W, ("f", "{}")],
        ),
        (LLAMA, 'Use {"name": "f", "parameters": {}}', 'Use {"name": "f", "parameters": {}}', []),
        (LLAMA, '{"answer": 1} or so', '{"answer": 1} or so', []),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]', "", [W]),
        (
            MISTRAL,
            f'Yes. [TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "abcdefghi"}}, '
            '{"name": "f", "arguments": {}}] ',
            "Yes.",
            [W, ("f", "{}")],
        ),
        (MISTRAL, f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]f[ARGS]{{}}", "", [W, ("f", "{}")]),
        (MISTRAL, f"[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{PARIS}", "", [W]),
    ],
)
def test_calls_of_each_format(outline: Outline, text: str, content: str, calls: list[tuple[str, str]] | None) -> None:
    found = answer(outline, text)
    assert found.content == content
    if calls is None:  # cut off in the middle of its arguments
        assert found.calls == [Call("f", '{"a": [1, {"b": "}</tool_call>"')]
    else:
        assert [(c.name, c.arguments) for c in found.calls] == calls
        assert all(isinstance(json.loads(c.arguments), dict) for c in found.calls)


@pytest.mark.parametrize(
    ("outline", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'),
        (HERMES, "<tool_call>get_weather(Paris)</tool_call>"),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "Paris"}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", '),
        (HERMES, "<tool_call>"),
        (HERMES, "a <tool_"),
        (HERMES, "<tool_call>{" + '"a":[' * 400),
        (HERMES, "  blanks around  "),
        (LLAMA, '{"name": "nobody", "parameters": {}}'),
        (LLAMA, '<|python_tag|>brave_search.call(query="x")'),
        (LLAMA, "{"),
        (MISTRAL, "[TOOL_CALLS]"),
        (MISTRAL, "[TOOL_CALLS]nobody{}"),
        (MISTRAL, "[TOOL_CALLS] [1, 2]"),
        (MISTRAL, "[TOOL_CALLS]" + "x" * 500),
    ],
)
def test_what_is_no_call_stays_text(outline: Outline, text: str) -> None:
    assert answer(outline, text) == Answer(content=text)


def test_a_call_behind_nonsense_is_found() -> None:
    found = answer(HERMES, '<tool_call>{"oops <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    assert found.calls == [Call("f", '{"a": 1}')]
    assert found.content == '<tool_call>{"oops'


def test_broken_arguments_are_handed_on_to_the_end_of_the_call() -> None:
    found = answer(HERMES, '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call> and so on')
    assert found.calls == [Call("f", '{"a": <b>}}')]
    assert found.content == " and so on"


def test_only_the_first_call_where_one_is_wanted() -> None:
    one = '<tool_call>{"name": "f", "arguments": {"a": %d}}</tool_call>'
    found = answer(Outline("hermes", NAMES, parallel=False), one % 1 + one % 2 + " end")
    assert found == Answer(" end", "", [Call("f", '{"a": 1}')])


def test_arguments_come_as_they_grow() -> None:
    parser = AnswerParser(HERMES)
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"a": "one') == [("call", "f"), ("arguments", '{"a": "one')]
    assert parser.feed(" two") == [("arguments", " two")]
    assert parser.feed('"}') == [("arguments", '"}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("thoughts", "text", "thought", "content"),
    [
        (THINK, "<think>\nhm\n</think>\n\nFour.", "hm", "Four."),
        (THINK, "\n<think>hm</think>Four.", "hm", "Four."),
        (THINK, "<think>\n\n</think>\n\nFour.", "", "Four."),
        (THINK, "<think>cut", "cut", ""),
        (THINK, "Four. <think>x</think>", "", "Four. <think>x</think>"),
        (THINK, " Four.", "", " Four."),
        (THINK, "<thin", "", "<thin"),
        (BEGUN, "hm\n</think>\n\nFour.", "hm", "Four."),
        (BEGUN, "<think>\nhm</think>Four.", "hm", "Four."),
        (BEGUN, "cut </thi", "cut </thi", ""),
        (BEGUN, "a </b> c</think>", "a </b> c", ""),
        (BEGUN, "a</think>b</think>c", "a", "b</think>c"),
        (BEGUN, "a</think> </think>\nc", "a", "c"),
        (THINK, "</think></think>c", "", "c"),
        (THINK, "</thin", "", "</thin"),
        (None, "<think>x</think>", "", "<think>x</think>"),
    ],
)
def test_thoughts(thoughts: Thoughts | None, text: str, thought: str, content: str) -> None:
    found = answer(Outline(thoughts=thoughts), text)
    assert (found.thoughts, found.content) == (thought, content)


def test_thoughts_and_calls_together() -> None:
    text = '<think>\nI <tool_call> it\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = answer(Outline("hermes", NAMES, thoughts=THINK), text)
    assert found == Answer("", "I <tool_call> it", [Call("f", "{}")])


def test_ids_of_calls_are_the_same_everywhere_and_differ() -> None:
    assert call_id("a", 0) == call_id("a", 0)
    assert len({call_id(uid, i) for uid in "ab" for i in range(3)}) == 6
    assert len(call_id("a", 0)) <= 40


SCRAPS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[", "]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{",
    "}", '{"name": "f", "arguments": {', '"name": "get_weather", ', '"parameters": {"city": "Paris"}', '"', "\\", ",",
    ":", ";", " ", "\n", "f", "get_weather", "{}", "1", "true", "x", "<think>", "</think>", "</thi", '{"a": "b"}',
    '{"name": "f", "arguments": {"a": 1}}', '"arguments": ', "\t", "é", "\x00",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(SCRAPS), st.text(max_size=3)), max_size=14)
OUTLINES = st.builds(
    Outline,
    tools=st.sampled_from(["", "hermes", "llama3", "mistral"]),
    functions=st.just(NAMES),
    thoughts=st.sampled_from([None, THINK, BEGUN]),
)


def flat(found: Answer) -> Any:
    return found.content, found.thoughts, [(c.name, c.arguments) for c in found.calls]


@settings(max_examples=400, deadline=None)
@given(OUTLINES, TEXTS, st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_cuts_play_no_part(outline: Outline, scraps: list[str], sizes: list[int]) -> None:
    text = "".join(scraps)
    whole = flat(answer(outline, text))
    cuts, at = [], 0
    while at < len(text):
        size = sizes[len(cuts) % len(sizes)]
        cuts.append(text[at : at + size])
        at += size
    assert flat(pieces(outline, cuts)) == whole
    assert flat(pieces(outline, list(text))) == whole


@settings(max_examples=400, deadline=None)
@given(OUTLINES, TEXTS)
def test_nothing_is_lost(outline: Outline, scraps: list[str]) -> None:
    """Without a call all text is there but for marks of thoughts and blanks; with one, in order, what is no frame."""
    text = "".join(scraps)
    found = answer(outline, text)
    if not found.calls:
        left = found.thoughts + found.content
        for mark in (THINK.open, THINK.close) if outline.thoughts else ():
            text, left = text.replace(mark, ""), left.replace(mark, "")
        assert "".join(left.split()) == "".join(text.split())
        assert outline.thoughts or left == text
        return
    at = 0
    for char in found.content:
        at = text.index(char, at) + 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.sampled_from(FORMATS),
)
def test_arguments_arrive_as_they_were_written(
    arguments: dict[str, Any], ascii_only: bool, indent: int | None, outline: Outline
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    call = f'{{"name": "f", "arguments": {written}}}'
    text = {"hermes": f"<tool_call>\n{call}\n</tool_call>", "llama3": call, "mistral": f"[TOOL_CALLS][{call}]"}
    assert answer(outline, text[outline.tools]) == Answer(calls=[Call("f", written)])
