"""Streams that their clients come back to: the rest of one behind an event, and its end before its time."""

import re
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.api.auth import Tenant
from services.api.job import Job
from services.api.places import HEADER, QUERY
from services.api.readers import no_such_stream
from services.api.resuming import ResumedResponse
from services.api.service import ApiService

router = APIRouter()

_RESPONSE_ID: Final = re.compile(r"(?:chatcmpl|cmpl)-([A-Za-z0-9_-]{1,64})", re.ASCII)
_TEXT: Final[dict[str, Any]] = {"type": "string"}
_ABOUT: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": HEADER, "in": "header", "required": False, "schema": _TEXT,
            "description": "`id` of the last event that was received; without it the stream is told from its start",
        },
        {
            "name": QUERY, "in": "query", "required": False, "schema": _TEXT,
            "description": f"the same as {HEADER}, for clients that cannot set a header; the header counts more",
        },
    ],
    "responses": {
        "200": {"description": "The rest of the events", "content": {"text/event-stream": {"schema": _TEXT}}},
        "400": {"description": f"{HEADER} names no event of this stream"},
        "404": {"description": "There is no such stream, or no more, or another API key opened it"},
    },
}  # fmt: skip


async def _attach(request: Request, response: str) -> Job:
    """Find a stream by the id of its response, for the key that asks.

    Raises:
        NotFound: there is none.
        Unavailable: this replica is shutting down.
        BrokerError: the broker is away.
    """
    service: ApiService = request.app.state.service
    service.admission.check_reader(len(service.readers.followed))
    name = _RESPONSE_ID.fullmatch(response)
    if name is None:
        raise no_such_stream()
    tenant: Tenant = request.scope["state"]["tenant"]
    job = await service.readers.attach(name[1], tenant.key_hash)
    if job.response_id != response:
        raise no_such_stream()
    return job


@router.get("/v1/streams/{response}", openapi_extra=_ABOUT, response_class=Response)
async def resume(response: str, request: Request) -> Response:
    """Give the rest of a stream that was opened with `X-Millrace-Resume: 1`.

    While it runs, and for a time after its end, any replica gives exactly what follows on the named event. Several
    may read one stream at once; each gets all of it.
    """
    job = await _attach(request, response)
    last = request.headers.get(HEADER) or request.query_params.get(QUERY) or None
    return ResumedResponse(request.app.state.service, job, last)


@router.delete("/v1/streams/{response}", status_code=204, response_class=Response)
async def cancel(response: str, request: Request) -> Response:
    """End a stream before its time, and forget it. Whoever still reads it is told so."""
    job = await _attach(request, response)
    service: ApiService = request.app.state.service
    await service.readers.cancel(job)
    await service.limits.free_left(job.uids[0])
    return Response(status_code=204)
