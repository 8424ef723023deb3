"""From what a client may write to llguidance's own grammars. Every failure names what is wrong, never the text."""

import json
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from services.scheduler.grammar.calls import Mark, behind_thoughts, calls_grammar, either, read_calls
from shared.errors import InvalidRequest
from shared.sampling import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_COMPACT: Final["JsonCompileOptions"] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON is written as `json.dumps` does: where any white space is allowed, small models write nothing else."""


def translate(grammar: Grammar, mark: Mark = json.dumps) -> str:
    """Give llguidance's form of a grammar.

    Args:
        grammar: what was asked for.
        mark: gives a mark of calls or thoughts as a term of Lark.

    Raises:
        InvalidRequest: it can be seen at once that it is none.
    """
    answer = _translate(grammar, mark)
    if grammar.calls is not None:
        answer = either(answer, calls_grammar(grammar.calls, mark))
    return behind_thoughts(answer, grammar.thoughts, mark) if grammar.thoughts else answer


def _translate(grammar: Grammar, mark: Mark) -> str:
    try:
        match grammar.kind:
            case "calls":
                return calls_grammar(read_calls(grammar), mark)
            case "json_schema":
                options: JsonCompileOptions = {**_COMPACT, "lenient": grammar.lenient}
                return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
            case "regex":
                return LLMatcher.grammar_from_regex(_ascii_classes(grammar.text))
            case "choice":
                texts = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
                return LLMatcher.grammar_from_lark(f"start: {texts}")
            case "ebnf":
                return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    except (ValueError, GbnfToLarkError) as e:
        raise refusal(grammar, str(e)) from e
    except Exception as e:  # the translator of GBNF raises bare ones
        raise refusal(grammar, f"it cannot be read ({type(e).__name__})") from e


_MAX_REASON: Final = 300


def _ascii_classes(regex: str) -> str:
    r"""Let \d and \w mean ASCII, as they do in the patterns of JSON schemas, and not all scripts of the world."""
    parts: list[str] = []
    in_class = False
    at = 0
    while at < len(regex):
        token = regex[at : at + 2] if regex[at] == "\\" else regex[at]
        at += len(token)
        if token == "[":
            in_class = True
        elif token == "]":
            in_class = False
        members = _CLASSES.get(token)
        parts.append(token if members is None else members if in_class else f"[{members}]")
    return "".join(parts)


_CLASSES: Final = {"\\d": "0-9", "\\w": "0-9A-Za-z_"}


_IN_WORDS: Final = {"NoExtensionBias": "no answer fits it"}


def refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    """Make the 400 of a grammar that cannot be compiled."""
    field = grammar.field
    first = " ".join(reason.partition("<state>")[0].split())[:_MAX_REASON]  # behind it the library shows its insides
    first = _IN_WORDS.get(first, first)
    what = "schema" if grammar.kind in ("json_schema", "calls") else "grammar"
    return InvalidRequest(f"{field}: the {what} cannot be used: {first}", param=field, code="invalid_grammar")
