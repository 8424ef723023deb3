"""Tools as clients offer them: which are shown to the model, which calls are looked for, which are forced.

Here they become an outline of the answer, and where a call is forced a grammar. Every refusal names the field.
"""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.api.schema import AllowedTools, ChatRequest, FunctionSpec, NamedTool, Tool, check_tree
from shared.dialect import MAX_FUNCTIONS, CallShapes, Dialect, FunctionShape, Outline, Thoughts
from shared.errors import InvalidRequest, Unavailable
from shared.sampling import MAX_GRAMMAR_BYTES, Grammar

_NOTHING: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINED: Final = ("$ref", "anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request says of tools.

    Attributes:
        shown: for the chat template, or None.
        functions: names that may be called.
        possible: the calls that an answer may consist of, where it is not any text anyway.
        forced: grammar of an answer that must call, or None.
        free: grammar of any text in which calls are held to their schemas, where a strict function wants that.
    """

    shown: list[dict[str, Any]] | None = None
    functions: tuple[str, ...] = ()
    possible: CallShapes | None = None
    forced: Grammar | None = None
    free: Grammar | None = None


def read_tools(body: ChatRequest, dialect: Dialect | None, thoughts: Thoughts | None, max_depth: int) -> Offer:
    """Check a request's tools and what it says of calling them.

    Args:
        body: the request.
        dialect: of its model; None while no tokenizer has said it.
        thoughts: that may come in front of the answer.
        max_depth: of schemas.

    Raises:
        InvalidRequest: naming the field.
        Unavailable: it is not known yet how the model writes calls.
    """
    tools = body.tools or []
    if len(tools) > MAX_FUNCTIONS:
        raise InvalidRequest.of_field("tools", f"at most {MAX_FUNCTIONS} are allowed")
    for i, tool in enumerate(tools):
        _check(tool, i, max_depth)
    mode, allowed = _mode(body, {tool.function.name for tool in tools})
    if mode == "none" or not tools:
        return Offer()
    if dialect is None:
        raise Unavailable("no tokenizer has said yet how this model calls tools; try again", code="no_tokenizer")
    functions = tuple(dict.fromkeys(tool.function.name for tool in tools if tool.function.name in allowed))
    shown = [_plain(tool) for tool in tools]
    numbers = {tool.function.name: i for i, tool in reversed(list(enumerate(tools)))}
    shapes = [_shape(tools[numbers[name]].function, numbers[name]) for name in functions]
    parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    calls = CallShapes(dialect.tools or "hermes", shapes, parallel)
    if mode == "required":
        return Offer(shown, functions, forced=_grammar(calls, thoughts))
    if not dialect.tools:
        return Offer(shown, functions)
    free = None
    if any(shape.strict for shape in shapes):
        free = _grammar(msgspec.structs.replace(calls, free=True), thoughts)
    return Offer(shown, functions, calls, free=free)


def make_outline(body: ChatRequest, dialect: Dialect | None, offer: Offer, thoughts: Thoughts | None) -> Outline | None:
    """Say what is to be taken out of an answer; None for nothing.

    An answer that must be a call is always read, also where calls that the model makes by itself are not looked for.
    """
    tools = dialect.tools if dialect is not None and offer.functions else ""
    if offer.forced is not None and not tools:
        tools = "hermes"
    if not tools and thoughts is None:
        return None
    return Outline(tools, list(offer.functions) if tools else [], body.parallel_tool_calls is not False, thoughts)


def _check(tool: Tool, i: int, max_depth: int) -> None:
    where = f"tools[{i}].function.parameters"
    parameters = tool.function.parameters
    if parameters is None:
        return
    check_tree(parameters, where, max_depth)
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidRequest.of_field(f"{where}.type", "must be 'object': arguments are passed by name")


def _mode(body: ChatRequest, names: set[str]) -> tuple[str, set[str]]:
    """Give none, auto or required, and the names that may be called."""
    choice = body.tool_choice
    if choice is None:
        return "auto", names
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise InvalidRequest.of_field("tool_choice", "must be none, auto, required or a named function")
        if choice == "required" and not names:
            raise InvalidRequest.of_field("tool_choice", "required needs tools")
        return choice, names
    if isinstance(choice, NamedTool):
        wanted, param, mode = [choice.function.name], "tool_choice.function.name", "required"
    else:
        wanted, param = _allowed(choice), "tool_choice.allowed_tools.tools"
        mode = choice.allowed_tools.mode
    for name in wanted:
        if name not in names:
            raise InvalidRequest.of_field(param, f"no function {name[:64]!r} is in tools")
    return mode, set(wanted)


def _allowed(choice: AllowedTools) -> list[str]:
    return [tool.function.name for tool in choice.allowed_tools.tools]


def _plain(tool: Tool) -> dict[str, Any]:
    """Write a tool for the chat template: fields that were left out are left out."""
    plain: dict[str, Any] = msgspec.to_builtins(tool)
    function = {k: v for k, v in plain["function"].items() if v is not None}
    return {"type": "function", "function": function}


def _shape(function: FunctionSpec, i: int) -> FunctionShape:
    """Give the arguments that a call must have: those that are declared, unless the schema says that others may be."""
    schema = dict(function.parameters or _NOTHING)
    if not any(key in schema for key in _COMBINED):
        schema.setdefault("type", "object")
        if _declares_all(schema):
            schema.setdefault("additionalProperties", False)
    text = msgspec.json.encode(schema).decode()
    return FunctionShape(function.name, text, bool(function.strict), f"tools[{i}].function.parameters")


def _declares_all(schema: dict[str, Any]) -> bool:
    """Whether a schema names its properties, and requires none that it does not name."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def write_shapes(calls: CallShapes) -> str:
    """Write calls as the text of a grammar.

    Raises:
        InvalidRequest: they are too large for one.
    """
    text = msgspec.json.encode(calls)
    if len(text) > MAX_GRAMMAR_BYTES:
        reason = f"where a grammar holds calls, all together must not exceed {MAX_GRAMMAR_BYTES} bytes"
        raise InvalidRequest.of_field("tools", reason)
    return text.decode()


def _grammar(calls: CallShapes, thoughts: Thoughts | None) -> Grammar:
    text = write_shapes(calls)
    field = calls.functions[0].field if len(calls.functions) == 1 else "tools"
    return Grammar("calls", text, field=field, thoughts=thoughts)
