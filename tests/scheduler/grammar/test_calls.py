"""Grammars of calls and of thoughts: what they allow, in each format."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from services.scheduler.grammar.compiler import GrammarCompiler, GrammarVocabulary
from shared.dialect import CallShapes, FunctionShape, Thoughts, ToolFormat
from shared.errors import InvalidRequest
from shared.sampling import Grammar
from shared.vocab import byte_vocabulary
from tests.scheduler.grammar.compiling import EOS, VOCAB, byte_compiler, compiled
from tests.scheduler.grammar.test_compiler import allowed, follow

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = FunctionShape("get_weather", json.dumps(CITY), field="tools.0.function.parameters")
TIME = FunctionShape("now", json.dumps({"type": "object", "additionalProperties": False}))
PARIS = '{"city": "Paris"}'
HERMES = CallShapes("hermes", [WEATHER, TIME])
THINK = Thoughts("<think>", "</think>")
BEGUN = Thoughts("<think>", "</think>", begun=True)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = byte_compiler()
    yield made
    made.close()


def calls(
    tools: ToolFormat, *functions: FunctionShape, parallel: bool = True, free: bool = False, **more: Any
) -> Grammar:
    shapes = CallShapes(tools, list(functions or (WEATHER, TIME)), parallel, free)
    return Grammar("calls", msgspec.json.encode(shapes).decode(), field="tools", **more)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE, TWO = hermes("get_weather", PARIS), hermes("now", "{}")
JSON = f'{{"name": "get_weather", "parameters": {PARIS}}}'


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (calls("hermes"), ONE, "Paris"),
        (calls("hermes"), f"{ONE}\n{TWO}", hermes("nobody", "{}")),
        (calls("hermes", WEATHER), ONE, TWO),
        (calls("hermes", parallel=False), TWO, f"{ONE}\n"),
        (calls("llama3"), f'{JSON}; {{"name": "now", "parameters": {{}}}}', '{"name": "now", "parameters": {"a": 1}}'),
        (calls("mistral"), f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]', "[TOOL_CALLS][]"),
        (calls("hermes", thoughts=THINK), f"<think>\nno {{}} <b>\n</think>\n\n{TWO}", f"hm</think>{TWO}"),
        (calls("hermes", thoughts=THINK), TWO, "x"),
        (calls("hermes", free=True), f"See <b>:\n{ONE}\n{TWO}", f"See {hermes('nobody', '{}')}"),
        (calls("hermes", free=True), "no <tool> at all", f"{ONE} and more"),
        (calls("hermes", free=True, thoughts=BEGUN), f"<tool_call>?</think>{TWO}", "</think><tool_call>?"),
        (calls("llama3", free=True), JSON, '{"name": "now", "parameters": {"a": 1}}'),
        (calls("llama3", free=True), '{"answer": 1}', f"{JSON} and more"),
        (
            calls("mistral", free=True),
            f'So.[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]',
            "[TOOL_CALLS]x",
        ),
        (calls("hermes", thoughts=BEGUN), f"a </b> c</think>{TWO}", f"{TWO} x"),
        (Grammar("regex", "ab+", thoughts=BEGUN), "x\n</think>\n\nabb", "abb"),
        (Grammar("json_schema", json.dumps(CITY), thoughts=THINK), f"<think></think>{PARIS}", "<think>{}"),
        (Grammar("choice", '["yes", "no"]', thoughts=THINK), "no", "<think>no"),
        (Grammar("json_schema", json.dumps(CITY), calls=HERMES), f"{ONE}\n{TWO}", f"{PARIS}{ONE}"),
        (Grammar("json_schema", json.dumps(CITY), calls=HERMES, thoughts=BEGUN), f"</think>{PARIS}", "Paris"),
        (Grammar("ebnf", 'root ::= "a"*', thoughts=BEGUN), "</think>\n\naa", "aa"),
    ],
)
def test_what_they_allow(compiler: GrammarCompiler, grammar: Grammar, good: str, bad: str) -> None:
    matcher = compiled(compiler, grammar)
    assert follow(matcher, good.encode())
    assert EOS in allowed(matcher)
    other = compiled(compiler, grammar)
    assert not (follow(other, bad.encode()) and EOS in allowed(other))


def test_a_schema_that_cannot_be_used_is_named_by_its_field(compiler: GrammarCompiler) -> None:
    bad = FunctionShape("f", '{"type": "strin"}', field="tools.1.function.parameters")
    error = compiled(compiler, calls("hermes", WEATHER, bad))
    assert isinstance(error, InvalidRequest)
    assert error.param == "tools.1.function.parameters" and error.code == "invalid_grammar"


def test_strict_refuses_what_the_other_leaves_aside(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    assert not isinstance(compiled(compiler, calls("hermes", FunctionShape("f", schema))), InvalidRequest)
    assert isinstance(compiled(compiler, calls("hermes", FunctionShape("f", schema, strict=True))), InvalidRequest)


def test_marks_that_are_control_tokens_are_drawn_as_those() -> None:
    vocabulary = byte_vocabulary()
    tokens = [*vocabulary.tokens, b"[TOOL_CALLS]", b"</think>"]
    special = vocabulary.special_ids | {VOCAB, VOCAB + 1}
    with_marks = dataclasses.replace(vocabulary, tokens=tokens, special_ids=special)
    made = GrammarCompiler(GrammarVocabulary(lambda: with_marks, VOCAB + 2, (EOS,)))
    try:
        free = compiled(made, calls("mistral", TIME, free=True))
        assert {EOS, VOCAB, ord("x")} <= allowed(free, VOCAB + 2)
        for token in (*b"So", VOCAB):
            assert free.accept(token)
        assert allowed(free, VOCAB + 2) == {ord("[")}
        matcher = compiled(made, calls("mistral", TIME, thoughts=BEGUN))
        for token in (*b"hm ", VOCAB + 1):
            assert matcher.accept(token)
        assert allowed(matcher, VOCAB + 2) == {VOCAB, ord("\n")}
        for token in (VOCAB, *b'[{"name": "now", "arguments": {}}]'):
            assert matcher.accept(token)
        assert matcher.complete
    finally:
        made.close()
