"""What an answer must look like, in the words of several kinds of clients: OpenAI, vLLM, SGLang.

Here it becomes one grammar, or a refusal that names the field. Whether the grammar itself makes sense is for the
engine to say: it compiles it, and refuses it before the answer begins.
"""

from typing import Any

import msgspec

from services.api.schema import Sampling, check_tree
from services.api.tools import Offer, write_shapes
from shared.dialect import Thoughts
from shared.errors import InvalidRequest
from shared.sampling import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

_ANY_OBJECT = '{"type":"object"}'


def grammar_of(body: Sampling, max_depth: int) -> Grammar | None:
    """Give the grammar of a request, or None when any text will do.

    Raises:
        InvalidRequest: naming the field: incomplete, too large, or a second one.
    """
    found = [*_of_format(body, max_depth), *_of_structured(body, max_depth), *_of_plain(body)]
    if len(found) > 1:
        raise InvalidRequest.of_field(found[1].field, f"cannot be set together with {found[0].field}")
    return found[0] if found else None


def guide(grammar: Grammar | None, offer: Offer, thoughts: Thoughts | None) -> Grammar | None:
    """Join what an answer must look like with the calls it may or must make, and the thoughts in front of it.

    Args:
        grammar: of the answer, or None.
        offer: of tools.
        thoughts: that may come first.

    Raises:
        InvalidRequest: a call is forced, so there can be no answer of another grammar; or it is all too large.
    """
    if offer.forced is not None:
        if grammar is not None and not grammar.field.startswith("response_format"):
            raise InvalidRequest.of_field(grammar.field, "cannot be set together with a tool_choice that forces a call")
        return offer.forced
    if grammar is None:
        return offer.free
    if offer.possible is not None:
        write_shapes(offer.possible)  # a grammar of such a size is refused
    return msgspec.structs.replace(grammar, thoughts=thoughts, calls=offer.possible)


def _make(kind: GrammarKind, text: str, field: str, *, lenient: bool = False) -> Grammar:
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest.of_field(field, f"must not be larger than {MAX_GRAMMAR_BYTES} bytes")
    if not text:
        raise InvalidRequest.of_field(field, "must not be empty")
    return Grammar(kind, text, lenient, field)


def _schema(schema: Any, field: str, max_depth: int, *, lenient: bool) -> Grammar:
    if not isinstance(schema, dict):
        raise InvalidRequest.of_field(field, "must be a JSON schema: an object")
    check_tree(schema, field, max_depth)
    return _make("json_schema", msgspec.json.encode(schema).decode(), field, lenient=lenient)


def _parsed(text: str, field: str, max_depth: int) -> Grammar:
    """Take a schema that was sent as text."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as e:
        raise InvalidRequest.of_field(field, "must be a JSON schema, as JSON") from e
    return _schema(schema, field, max_depth, lenient=True)


def _of_format(body: Sampling, max_depth: int) -> list[Grammar]:
    given = body.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [Grammar("json_schema", _ANY_OBJECT)]
    if given.json_schema is None:
        raise InvalidRequest.of_field("response_format.json_schema", "is needed for this type")
    form = given.json_schema
    return [_schema(form.schema, "response_format.json_schema.schema", max_depth, lenient=not form.strict)]


def _of_structured(body: Sampling, max_depth: int) -> list[Grammar]:
    given = body.structured_outputs
    if given is None:
        return []
    name = "structured_outputs"
    found: list[Grammar] = []
    if isinstance(given.json, str):
        found.append(_parsed(given.json, f"{name}.json", max_depth))
    elif given.json is not None:
        found.append(_schema(given.json, f"{name}.json", max_depth, lenient=True))
    if given.json_object:
        found.append(Grammar("json_schema", _ANY_OBJECT, field=f"{name}.json_object"))
    if given.regex is not None:
        found.append(_make("regex", given.regex, f"{name}.regex"))
    if given.choice is not None:
        found.append(_make("choice", msgspec.json.encode(given.choice).decode(), f"{name}.choice"))
    if given.grammar is not None:
        found.append(_make("ebnf", given.grammar, f"{name}.grammar"))
    if not found:
        what = "must say what the answer is to be: json, json_object, regex, choice or grammar"
        raise InvalidRequest.of_field(name, what)
    return found


def _of_plain(body: Sampling) -> list[Grammar]:
    found: list[Grammar] = []
    if body.regex is not None:
        found.append(_make("regex", body.regex, "regex"))
    if body.ebnf is not None:
        found.append(_make("ebnf", body.ebnf, "ebnf"))
    if body.json_schema is not None:
        found.append(_parsed(body.json_schema, "json_schema", 64))
    return found
