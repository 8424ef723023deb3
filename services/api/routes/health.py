"""Probes, metrics, version.

Probes answer HEAD too: some load balancers and `wget --spider` ask so.
"""

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.api.answer_schema import Liveness, Readiness, Startup, Version
from services.api.openapi import described
from services.api.service import ApiService
from shared.metrics import CONTENT_TYPE
from shared.version import VERSION

router = APIRouter()

PUBLIC_PATHS: Final = frozenset({"/livez", "/startupz", "/readyz", "/health"})
"""What needs no key."""
_NO_STORE: Final = {"cache-control": "no-store"}


def _json(status: int, body: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(body), status, _NO_STORE, "application/json")


@router.head("/livez", include_in_schema=False)
@router.get("/livez", openapi_extra=described(None, Liveness, busy=True))
async def livez(request: Request) -> Response:
    """Say that the process lives: its event loop answers, and no part of it has died."""
    service: ApiService = request.app.state.service
    return _json(503 if service.faulted else 200, {"alive": not service.faulted})


@router.head("/startupz", include_in_schema=False)
@router.get("/startupz", openapi_extra=described(None, Startup, busy=True))
async def startupz(request: Request) -> Response:
    """Say whether starting is over."""
    service: ApiService = request.app.state.service
    started = service.readiness.has_started
    return _json(200 if started else 503, {"started": started, "missing": service.missing()})


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", openapi_extra=described(None, Readiness, busy=True))
@router.head("/health", include_in_schema=False)
@router.get("/health", openapi_extra=described(None, Readiness, busy=True))
async def readyz(request: Request) -> Response:
    """Say whether requests would be served, and what is missing if not."""
    service: ApiService = request.app.state.service
    missing = service.missing()
    return _json(503 if missing else 200, {"ready": not missing, "missing": missing})


@router.get("/version", openapi_extra=described(None, Version))
async def version() -> Response:
    """Name the release."""
    return _json(200, {"version": VERSION})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Print the metrics of this process, or of all workers of the port."""
    service: ApiService = request.app.state.service
    return Response(service.metrics.render(), 200, _NO_STORE, CONTENT_TYPE)
