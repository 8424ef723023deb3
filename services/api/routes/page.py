"""The page at `/`: a chat and a live picture of the pipeline, as static files without anything from outside.

Owns how the files of `services/api/page` are sent: cached by their content, under a policy that lets the page load,
run and reach nothing but this server. What the page shows it asks of the public routes, with the key its user enters.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.api.service import ApiService
from shared.errors import NotFound

router = APIRouter()

_FOLDER: Final = Path(__file__).parent.parent / "page"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cache-control": "no-cache",  # kept by the browser, but asked for: an upgrade shows at once
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    """A file as it is sent."""

    body: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:16]}"')


_FILES: Final = {path.name: _read(path) for path in sorted(_FOLDER.iterdir())}
_INDEX: Final = "index.html"
PAGE_PATHS: Final = frozenset({"/", *(f"/page/{name}" for name in _FILES)})
"""What the page needs without a key."""


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """Show the page."""
    return _send(request, _INDEX)


@router.head("/page/{name}", include_in_schema=False)
@router.get("/page/{name}", include_in_schema=False)
async def part(name: str, request: Request) -> Response:
    """Send a part of the page."""
    return _send(request, name)


def _send(request: Request, name: str) -> Response:
    """Send a file, or say that the caller has it.

    Raises:
        NotFound: there is none, or the page is off.
    """
    service: ApiService = request.app.state.service
    file = _FILES.get(name)
    if file is None or service.settings.disable_page:
        raise NotFound("there is no such page")
    headers = {**_HEADERS, "etag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(None, 304, headers)
    return Response(file.body, 200, headers, file.media_type)
