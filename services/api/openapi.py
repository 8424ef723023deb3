"""The description of the api at /openapi.json: every route with its body, its answers, its errors and its key.

Owns how routes are described. The shapes are those of `schema.py`, which refuses, and of `answer_schema.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.api.answer_schema import ErrorAnswer

_REF: Final = "#/components/schemas/{name}"
_ERRORS: Final = {"4XX": "The request is refused", "5XX": "It could not be answered"}
_SCHEME: Final = "bearer"
_kinds: Final[dict[str, type[Any]]] = {ErrorAnswer.__name__: ErrorAnswer}


def described(
    body: type[Any] | None, answer: type[Any], *, streams: bool = False, busy: bool = False
) -> dict[str, Any]:
    """Describe a route, as its `openapi_extra`.

    Args:
        body: of its request; None for a route without one.
        answer: its answer in JSON.
        streams: the answer may be server-sent events instead.
        busy: a 503 has the same form as the answer.
    """
    content = {"application/json": {"schema": _reference(answer)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    if busy:
        responses["503"] = {"description": "The same, when the answer is no", "content": content}
    extra: dict[str, Any] = {"responses": responses}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
    return extra


def describer(app: FastAPI, *, public: Iterable[str], has_keys: bool) -> Callable[[], dict[str, Any]]:
    """Give what makes the description of an app, once.

    Args:
        app: with all its routes.
        public: paths that need no key.
        has_keys: whether the others do.
    """
    free = frozenset(public)

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, free, has_keys)
        return app.openapi_schema

    return describe


def _reference(kind: type[Any]) -> dict[str, Any]:
    _kinds[kind.__name__] = kind
    return {"$ref": _REF.format(name=kind.__name__)}


def _describe(app: FastAPI, public: frozenset[str], has_keys: bool) -> dict[str, Any]:
    page = get_openapi(title=app.title, version=app.version, routes=app.routes, description=app.description)
    _, components = msgspec.json.schema_components(_kinds.values(), ref_template=_REF)
    page["components"] = {
        "schemas": components,
        "securitySchemes": {_SCHEME: {"type": "http", "scheme": "bearer", "description": "An API key"}},
    }
    for path, operations in page["paths"].items():
        for operation in operations.values():
            _complete(operation, needs_key=has_keys and path not in public)
    return page


def _complete(operation: dict[str, Any], *, needs_key: bool) -> None:
    """Add what all routes have in common: the errors, and the key."""
    responses = operation["responses"]
    responses.pop("422", None)  # the framework's own, which no client of ours ever sees
    for status, words in _ERRORS.items():
        content = {"application/json": {"schema": _reference(ErrorAnswer)}}
        responses.setdefault(status, {"description": words, "content": content})
    operation["security"] = [{_SCHEME: []}] if needs_key else []
