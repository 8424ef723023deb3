"""The description of the api as a page at /docs: Swagger UI, sent from here, so that nothing is loaded from outside."""

import importlib.resources
from functools import cache
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from shared.errors import NotFound

router = APIRouter()

_PACKAGE: Final = "fastapi_offline"
_PAGE: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Millrace API</title><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="ui"></div><script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script></body>
</html>
"""
_START: Final = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#ui", deepLinking: true, validatorUrl: null});\n'
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_PARTS: Final = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}


@router.get("/docs", include_in_schema=False)
async def page() -> Response:
    """Show the page."""
    return Response(_PAGE, 200, _HEADERS, "text/html; charset=utf-8")


@router.get("/docs/{name}", include_in_schema=False)
async def part(name: str, request: Request) -> Response:
    """Send a part of the page.

    Raises:
        NotFound: there is none of that name.
    """
    if name == "start.js":
        return Response(_START, 200, _HEADERS, "text/javascript")
    if name not in _PARTS:
        raise NotFound("no such path", code="not_found")
    return Response(_read(name), 200, {**_HEADERS, "cache-control": "max-age=3600"}, _PARTS[name])


@cache
def _read(name: str) -> bytes:
    return (importlib.resources.files(_PACKAGE) / "static" / name).read_bytes()
