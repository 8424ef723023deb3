"""Grammars of answers that call tools, in the format the model writes calls in; and of thoughts in front of any answer.

The text that comes out is what the api's readers of answers expect (`services/api/answers`).
"""

import json
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from shared.dialect import TOOL_MARKS, CallShapes, FunctionShape, Thoughts
from shared.sampling import Grammar

Mark = Callable[[str], str]
"""Gives a mark as a term of a Lark grammar: a control token, or plain text."""
_GUIDANCE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_THOUGHT: Final = "thought"


def read_calls(grammar: Grammar) -> CallShapes:
    """Read the text of a grammar of calls."""
    return msgspec.json.decode(grammar.text, type=CallShapes)


def schemas_of(grammar: Grammar) -> list[Grammar]:
    """Give the schemas of a grammar's calls each by itself, with the fields they came in."""
    calls = read_calls(grammar) if grammar.kind == "calls" else grammar.calls
    return [Grammar("json_schema", f.schema, not f.strict, f.field) for f in calls.functions] if calls else []


def calls_grammar(calls: CallShapes, mark: Mark) -> str:
    """Give calls as a Lark grammar: one, or as many as the model likes where several are wanted.

    Where text may come first, it runs up to the mark of a call, and behind that mark nothing but a call may follow.
    """
    key = "parameters" if calls.tools == "llama3" else "arguments"
    rules = [_function(f, i, key) for i, f in enumerate(calls.functions)]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(calls.functions))))
    between = json.dumps({"llama3": "; ", "mistral": ", "}.get(calls.tools, "\n"))
    if calls.tools == "hermes":
        opening, closing = (mark(m) for m in TOOL_MARKS["hermes"])
        body = f'"\\n" call "\\n" {closing}'
        more = f"({between} {opening} {body})*" if calls.parallel else ""
        return "\n".join([*_opened(opening, f"{body} {more}", free=calls.free), *rules])
    several = f"call ({between} call)*" if calls.parallel else "call"
    if calls.tools == "mistral":
        opening = mark(TOOL_MARKS["mistral"][0])
        return "\n".join([*_opened(opening, f'"[" {several} "]"', free=calls.free), *rules])
    start = [f"start: {several}"]
    if calls.free:  # without a mark, a call is known by the beginning of its object
        names = "|".join(f.name for f in calls.functions)
        start = [f"start: TEXT | {several}", rf'TEXT: /(?s:.*)/ & ~/\s*\{{"name": "({names})"(?s:.*)/']
    return "\n".join([*start, *rules])


def _opened(opening: str, behind: str, *, free: bool) -> list[str]:
    """Give the rules of an answer whose calls begin with a mark."""
    if not free:
        return [f"start: {opening} {behind}"]
    if opening.startswith("<["):  # a control token is never part of a text
        return [f"start: TEXT? | TEXT? {opening} {behind}", "TEXT: /(?s:.+)/"]
    text = re.escape(json.loads(opening)).replace("/", "\\/")
    return [
        f"start: TEXT | front {behind}",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){text}(?s:.*)/",
        f"front[lazy]: /(?s:.*){text}/",
    ]


def _function(function: FunctionShape, number: int, key: str) -> str:
    schema: dict[str, Any] = json.loads(function.schema)
    schema["x-guidance"] = {**_GUIDANCE, "lenient": not function.strict}
    opening = f'{{"name": {json.dumps(function.name)}, "{key}": '
    return (
        f'call_{number}: {json.dumps(opening)} arguments_{number} "}}"\narguments_{number}: %json {json.dumps(schema)}'
    )


def behind_thoughts(grammar: str, thoughts: Thoughts, mark: Mark) -> str:
    """Put thoughts of any kind in front of a grammar in llguidance's form.

    Args:
        grammar: Lark, or a list of grammars as JSON.
        thoughts: their marks; unless the prompt has begun them, the answer may have none.
        mark: gives a mark as a term.
    """
    close = mark(thoughts.close)
    if close.startswith("<["):
        thought = f"{_THOUGHT}: TEXT {close}\nTEXT: /(?s:.*)/"
    else:
        end = re.escape(thoughts.close).replace("/", "\\/")
        thought = f"{_THOUGHT}[lazy]: /(?s:.*){end}/"
    front = f"{_THOUGHT} GAP?" if thoughts.begun else f"({mark(thoughts.open)} {_THOUGHT} GAP?)?"
    return _compose(f"start: {front} @guided\n{thought}\nGAP: /\\n\\n?/", guided=grammar)


def either(answer: str, calls: str) -> str:
    """Let an answer be of one grammar or of the other, both in llguidance's form."""
    return _compose("start: @answer | @calls", answer=answer, calls=calls)


def _compose(front: str, **named: str) -> str:
    """Join grammars into a list, of which the first refers to the others by name."""
    grammars: list[dict[str, Any]] = [{"name": "front", "lark_grammar": front}]
    for name, grammar in named.items():
        inner = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else [{"lark_grammar": grammar}]
        grammars += [{**inner[0], "name": name}, *inner[1:]]
    return json.dumps({"grammars": grammars})
