"""What grammars allow, token by token, and what is refused with which words."""

import itertools
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

from services.scheduler.core.batch import mask_words
from services.scheduler.grammar import compiler as compiler_module
from services.scheduler.grammar.compiler import GrammarCompiler, GrammarVocabulary
from services.scheduler.grammar.tokens import _Tokens
from services.scheduler.grammar.translate import translate
from shared.errors import InvalidRequest, ServerFault
from shared.model_files import EMBEDDED_NAME, locate
from shared.sampling import Grammar
from shared.vocab import BYTE_SPECIALS, byte_vocabulary, load_vocabulary
from tests.scheduler.grammar.compiling import EOS, VOCAB, byte_compiler, compiled

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value: object, *, lenient: bool = False) -> Grammar:
    return Grammar("json_schema", json.dumps(value), lenient)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = byte_compiler()
    yield made
    made.close()


def allowed(matcher, vocab_size: int = VOCAB) -> set[int]:
    mask = np.zeros(mask_words(vocab_size), np.int32)
    assert matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follow(matcher, text: bytes) -> bool:
    """Whether a text is allowed to its last token, by masks and by the matcher alike."""
    for byte in text:
        may = byte in allowed(matcher)
        assert matcher.accept(byte) == may
        if not may:
            return False
    return True


MATCHES = [
    (schema(PERSON), b'{"name": "Ann", "age": 7}', b'{"name": "Ann"}'),
    (schema(PERSON), b'{"name": "\xc3\xa9", "age": -10}', b'{"age"'),
    (schema({"type": "object"}), b'{"a": [1, {"b": null}]}', b"[]"),
    (schema({"enum": ["a", 1]}), b"1", b"b"),
    (schema({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}), b"12", b"x"),
    (schema({"type": "string", "pattern": r"^\d+$"}), b'"12"', b'"1a'),
    (Grammar("regex", r"\d{3}-[\w.]+"), b"123-a.b", "١".encode()),
    (Grammar("regex", r"[^\]]x\\d"), b"ax\\d", b"]"),
    (Grammar("ebnf", 'root ::= "yes" | "no" ("!")*'), b"no!!", b"nay"),
    (Grammar("ebnf", 'start: WORD ("," WORD)*\nWORD: /[a-z]+/'), b"a,bc", b"A"),
    (Grammar("choice", '["one", "o\\"ne", "\\u00e9"]'), b'o"ne', b"two"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), MATCHES, ids=range(len(MATCHES)))
def test_what_fits_may_end_and_what_does_not_is_not_allowed(
    compiler: GrammarCompiler, grammar: Grammar, good: bytes, bad: bytes
) -> None:
    matcher = compiled(compiler, grammar)
    assert EOS not in allowed(matcher)
    assert follow(matcher, good)
    assert EOS in allowed(matcher)
    other = compiled(compiler, grammar)
    assert not (follow(other, bad) and EOS in allowed(other))


REFUSED = [
    (schema({"type": "strin"}), "strin"),
    (schema({"type": "string", "pattern": "("}), "unclosed"),
    (schema({"$ref": "#/nope"}), "/nope"),
    (schema({"type": "string", "pattern": "(?<=a)b"}), "look"),
    (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "[Uu]nsatisfiable"),
    (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (Grammar("json_schema", "[]"), "object"),
    (Grammar("regex", "("), "unclosed"),
    (Grammar("regex", "(?<=a)b"), "look"),
    (Grammar("ebnf", "bogus"), "::="),
    (Grammar("ebnf", "start: nothing"), "nothing"),
    (Grammar("ebnf", " "), ""),
    (Grammar("regex", "a" * 200_000), "bytes"),
    (Grammar("regex", r"[^\s\S]"), "no answer fits it$"),
    (Grammar("ebnf", "root ::= root"), "no answer fits it$"),
    (schema({"$ref": "#"}), "no answer fits it$"),
]


@pytest.mark.parametrize(("grammar", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_compiled_is_refused_with_its_field(
    compiler: GrammarCompiler, grammar: Grammar, why: str
) -> None:
    error = compiled(compiler, Grammar(grammar.kind, grammar.text, grammar.lenient, "the.field"))
    assert isinstance(error, InvalidRequest)
    assert error.param == "the.field" and error.code == "invalid_grammar" and len(error.message) < 500
    assert re.search(why, error.message)


def test_a_lenient_schema_leaves_aside_what_cannot_be_enforced(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, schema({"type": "array", "uniqueItems": True}, lenient=True))
    assert follow(matcher, b"[1, 1]")
    assert isinstance(compiled(compiler, schema({"type": "strin"}, lenient=True)), InvalidRequest)


def test_complete_means_that_nothing_but_an_end_can_follow(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, Grammar("regex", "a{1,2}"))
    assert matcher.accept(ord("a")) and not matcher.complete
    assert matcher.accept(ord("a")) and matcher.complete
    assert allowed(matcher) == {EOS}


def test_said_tokens_are_followed_first(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "abc")
    assert allowed(compiled(compiler, grammar, b"ab")) == {ord("c")}
    assert compiled(compiler, grammar, b"abc").complete
    assert isinstance(compiled(compiler, grammar, b"xb"), ServerFault)


def test_matchers_of_one_grammar_are_apart(compiler: GrammarCompiler) -> None:
    one, two = (compiled(compiler, Grammar("regex", "ab|cd")) for _ in range(2))
    assert one.accept(ord("a"))
    assert allowed(one) == {ord("b")} and allowed(two) == {ord("a"), ord("c")}


def test_ignored_end_tokens_are_never_allowed(compiler: GrammarCompiler) -> None:
    matcher = compiled(compiler, Grammar("regex", "a+"), b"a", ignore_eos=True)
    assert allowed(matcher) == {ord("a")}


def test_every_end_token_is_allowed_and_ids_beyond_the_vocabulary_are_not() -> None:
    compiler = byte_compiler(eos_ids=(257, 258), vocab_size=320)
    matcher = compiled(compiler, Grammar("regex", "[a-z]"), b"a")
    assert allowed(matcher, 320) == {257, 258}
    compiler.close()


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Grammar] = []
    monkeypatch.setattr(compiler_module, "translate", lambda grammar, _: seen.append(grammar) or translate(grammar))
    for field in ("regex", "regex", "structured_outputs.regex"):
        assert compiled(compiler, Grammar("regex", "once+", field=field)).accept(ord("o"))
    assert len(seen) == 1


def chained(rule: str, num: int) -> str:
    """Rules that name each other in a chain, the last of which is an "a"; short names leave room for many."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"{a}{b}{c}" for a in letters for b in letters for c in letters][:num]
    rules = [f"{name}:{rule.format(following)}" for name, following in itertools.pairwise(names)]
    return "\n".join([f"start:{names[0]}", *rules, f'{names[-1]}:"a"'])


REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"type": "integer"}}
HOSTILE = [
    (Grammar("regex", "(x{1,1000}){1,1000}y"), b"xxxxy", b"yxy"),
    (Grammar("regex", "(a|b|c){100000}x{100000}"), b"abcabc", b"abx"),
    (Grammar("ebnf", 'start: start start | "a" | ""'), b"aaaaaaaa", b"ab"),
    (
        schema({"type": "array", "minItems": 100_000, "items": {"type": "string", "pattern": "^(x|y){500,1000}z$"}}),
        b'["' + b"xy" * 250 + b'z", "x',
        b'["xyz"]',
    ),
    (
        schema({"anyOf": [{"type": "string", "pattern": f"^(a|b){{{i}}}.*{i}$"} for i in range(60)]}),
        b'"ab c2"',
        b'"ab"]',
    ),
    (schema({"$defs": REFERENCES, "$ref": "#/$defs/d0"}), b"12", b"x"),
    (Grammar("ebnf", chained("{}", 14_000)), b"a", b"aa"),
    (Grammar("ebnf", chained('"a" {}', 9000)), b"aaaa", b"b"),
    (Grammar("ebnf", chained('{} "a"', 9000)), b"aaaa", b"b"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_grammar_is_followed_like_any_other(
    compiler: GrammarCompiler, grammar: Grammar, good: bytes, bad: bytes
) -> None:
    matcher = compiled(compiler, grammar)
    assert follow(matcher, good)
    assert not follow(compiled(compiler, grammar), bad)


TOO_HARD = [
    Grammar("regex", "(((((a{1,1000}){1,1000}){1,1000}){1,1000}b)c){1000}"),
    Grammar("regex", "((a{1000}){1000}){1000}"),
    Grammar("ebnf", chained("{}?", 12_000)),
]


@pytest.mark.parametrize("grammar", TOO_HARD, ids=range(len(TOO_HARD)))
def test_a_grammar_that_becomes_too_hard_is_lost_for_good(compiler: GrammarCompiler, grammar: Grammar) -> None:
    matcher = compiled(compiler, grammar)
    mask = np.zeros(mask_words(VOCAB), np.int32)
    steps = 0
    while matcher.fill(mask) and matcher.accept(ord("a")):
        steps += 1
        assert steps < 50, "its limits should have ended it"
    assert not matcher.fill(mask) and not matcher.accept(ord("a")) and not matcher.complete


def test_a_grammar_that_was_too_hard_before_is_refused(compiler: GrammarCompiler) -> None:
    grammar = Grammar("regex", "((b{1000}){1000}){1000}")
    compiled(compiler, grammar).accept(ord("b"))
    error = compiled(compiler, grammar)
    assert isinstance(error, InvalidRequest) and "too many expressions" in error.message


def test_a_vocabulary_that_cannot_be_loaded_is_our_fault_and_no_one_else_s(caplog: pytest.LogCaptureFixture) -> None:
    def broken():
        raise OSError("gone")

    compiler = GrammarCompiler(GrammarVocabulary(broken, VOCAB, (EOS,)))
    assert isinstance(compiled(compiler, Grammar("regex", "a")), ServerFault)
    assert "OSError" in caplog.text
    compiler.close()


def test_holes_and_empty_tokens_match_nothing() -> None:
    vocabulary = byte_vocabulary()
    tokens = [*vocabulary.tokens, None, b"", b"ab"]

    def load():
        return type(vocabulary)(encoder=vocabulary.encoder, tokens=tokens, special_ids=vocabulary.special_ids)

    compiler = GrammarCompiler(GrammarVocabulary(load, len(tokens), (EOS,)))
    matcher = compiled(compiler, Grammar("regex", "[a-z<>0-9]+"), b"a")
    may = allowed(matcher, len(tokens))
    assert {259, 260} & may == set() and 261 in may and ord("<") in may
    compiler.close()


@pytest.mark.parametrize("text", ["a<|end|>b", "<|end|>", "<|end|>x", "<|<|end|>"])
@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice"])
def test_a_forced_text_that_spells_a_control_token_stays_text(text: str, kind: str) -> None:
    text = text.replace("<|end|>", BYTE_SPECIALS[0])
    grammar, wanted = {
        "json_schema": (schema({"const": text}), json.dumps(text)),
        "regex": (Grammar("regex", re.escape(text)), text),
        "choice": (Grammar("json_schema", json.dumps({"enum": [text]})), json.dumps(text)),
    }[kind]
    made = byte_compiler()
    try:
        matcher = compiled(made, grammar)
        assert follow(matcher, wanted.encode()) and matcher.complete
    finally:
        made.close()


def test_a_forced_text_is_spelled_with_whole_tokens_wherever_it_can_be() -> None:
    vocabulary = load_vocabulary(locate(EMBEDDED_NAME))
    tokens = _Tokens(vocabulary, len(vocabulary.tokens), 2)
    for text in ("Hello there", "a<|im_end|>b", "<repo_name>", "<|im_start|><|im_end|> ü", "<<|im_end|>|im_end|>"):
        found = tokens(text.encode())
        assert b"".join(tokens.tokens[i] for i in found) == text.encode()
        assert vocabulary.special_ids.isdisjoint(found) and len(found) < len(text)
    assert tokens._by_longest(b"Hello there") == tokens(b"Hello there")
