"""The two routes that only a tokenizer answers: ids of a text, and text of ids."""

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.api.body import read_body, read_timeout
from services.api.exchange import Exchange
from services.api.job import Job
from services.api.openapi import described
from services.api.routes.generation import sign
from services.api.schema import too_large
from services.api.service import ApiService
from services.api.streaming import GenerationResponse
from services.api.tokenizing import (
    DEADLINE_S,
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    detokenize_job,
    make_body,
    tokenize_job,
)

router = APIRouter()


class TokenizerResponse(GenerationResponse):
    """Runs a job that a tokenizer ends, and writes its answer."""

    async def _collect(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        while exchange.num_open and not exchange.gone and exchange.first_error() is None:
            exchange.comment_due = False
            await exchange.take()
        error = exchange.first_error()
        if error is not None:
            await self._refuse(exchange, error, scope, receive, send)
        elif not exchange.gone:
            limit = self._service.fleet.load(exchange.job.model).max_seq_len
            await self._service.free(exchange)
            await Response(make_body(exchange, limit), 200, media_type="application/json")(scope, receive, send)


async def _respond(request: Request, make: Callable[..., Job]) -> Response:
    service: ApiService = request.app.state.service
    settings = service.settings
    data = await read_body(request, settings)
    if len(data) > settings.max_tokenize_bytes:
        raise too_large(settings.max_tokenize_bytes)
    job = make(data, settings.served_model_name, settings.max_json_depth, service.fleet.dialect)
    sign(request, job, len(data))
    job.timeout_s = min(read_timeout(request, None) or DEADLINE_S, DEADLINE_S)
    return TokenizerResponse(service, job)


@router.post("/tokenize", openapi_extra=described(TokenizeBody, TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """Give the ids of a text, or of a conversation as a chat request would have it."""
    return await _respond(request, tokenize_job)


@router.post("/detokenize", openapi_extra=described(DetokenizeBody, DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    """Give the text of ids."""
    return await _respond(request, detokenize_job)
