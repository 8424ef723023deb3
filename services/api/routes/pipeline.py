"""The picture of the pipeline as one JSON document, for the page at `/` and for whoever else watches."""

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.api.service import ApiService
from shared.errors import BrokerError
from shared.version import VERSION

router = APIRouter()


@router.get("/v1/pipeline")
async def pipeline(request: Request, since: int = 0) -> Response:
    """Show every instance with its lease, the queues between them, what happened of late, and the last minutes.

    `since` is the last second of the history that the caller has: only what came after it is sent. While the
    broker is away `connected` is false, and instances and queues are those seen last.
    """
    service: ApiService = request.app.state.service
    fleet, connected = service.fleet, service.fleet.connected
    try:
        hops = await service.hops.measure(fleet.models)
    except BrokerError:
        hops, connected = service.hops.measured, False
    body = {
        "at": round(time.time(), 3),
        "replica": service.incarnation,
        "version": VERSION,
        "models": list(fleet.models),
        "connected": connected,
        "missing": service.missing(),
        "instances": fleet.pipeline.instances(),
        "hops": hops,
        "events": fleet.pipeline.events(),
        "history": fleet.pipeline.history(since),
    }
    return Response(msgspec.json.encode(body), 200, {"cache-control": "no-store"}, "application/json")
