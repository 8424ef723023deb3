"""The app of one replica: routes, error handlers, and the layers around them."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from services.api.error_body import error_response, to_body
from services.api.gate import Gate
from services.api.limits import LIMIT_PARTS
from services.api.openapi import describer
from services.api.routes import docs, generation, health, models, page, pipeline, streams, tokenize
from services.api.routes.health import PUBLIC_PATHS
from services.api.service import ApiService
from shared.errors import InvalidRequest, MillraceError, NotFound
from shared.version import VERSION

_MAX_PATH: Final = 256
_CORS_MAX_AGE_S: Final = 600
_EXPOSED: Final = (
    "X-Request-Id",
    "X-Millrace-Stream-Id",
    "Retry-After",
    *(f"X-RateLimit-{part}" for part in LIMIT_PARTS),
)


def create_app(service: ApiService) -> ASGIApp:
    """Build the app around a service; its lifespan starts and stops the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="Millrace", version=VERSION, lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    app.state.service = service
    for part in (generation, tokenize, models, streams, health, pipeline, docs, page):
        app.include_router(part.router)
    app.add_exception_handler(MillraceError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(RequestValidationError, _refuse)
    public = PUBLIC_PATHS | (frozenset() if service.settings.metrics_key else {"/metrics"})
    app.openapi = describer(app, public=public, has_keys=bool(service.keys))  # type: ignore[method-assign]
    gated: ASGIApp = Gate(app, service)
    origins = list(service.settings.cors_origins)
    if origins:
        gated = CORSMiddleware(
            gated,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            max_age=_CORS_MAX_AGE_S,
        )
    return gated


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = _no_such_path(request)
    service: ApiService = request.app.state.service
    service.metrics.error(to_body(error))
    return error_response(error)


def _no_such_path(request: Request) -> NotFound:
    """Name the path, and the one that is meant where `/v1` is missing or doubled, or a slash is behind it."""
    path: str = request.scope["path"]
    single = re.sub(r"^(/v1)+(?=/)", "/v1", path.rstrip("/"))
    hint = ""
    for meant in (single, f"/v1{single}"):
        scope = {**request.scope, "path": meant}
        if meant != path and any(route.matches(scope)[0] != Match.NONE for route in request.app.router.routes):
            hint = f"; did you mean `{meant[:_MAX_PATH]}`?"
            break
    return NotFound(f"no such path: `{path[:_MAX_PATH]}`{hint}", code="not_found")


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer what the framework would call a 422: to OpenAI's clients a bad request is a 400."""
    return await _answer(request, InvalidRequest("the request's parameters are not valid"))
