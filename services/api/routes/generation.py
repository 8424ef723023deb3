"""The three routes that generate text: chat, completions, and the plain interface."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.api.auth import ANYBODY
from services.api.body import read_body, read_timeout, read_traceparent, refuse_resume
from services.api.intake import chat_job, completion_job, generate_job
from services.api.job import Job
from services.api.schema import ChatRequest, CompletionRequest, GenerateRequest, parse
from services.api.service import ApiService
from services.api.streaming import GenerationResponse

router = APIRouter()


def _described(kind: type[Any]) -> dict[str, Any]:
    """Point the route's documentation at the schema of its body."""
    reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


async def _respond(request: Request, make: Callable[[bytes, ApiService], Job]) -> Response:
    """Read, parse and check a request; its answer is made by the response itself."""
    service: ApiService = request.app.state.service
    refuse_resume(request)
    data = await read_body(request, service.settings)
    job = make(data, service)
    job.timeout_s = read_timeout(request, job.timeout_s)
    job.traceparent = read_traceparent(request)
    job.cost_bytes = len(data)
    state = request.scope.get("state", {})
    tenant = state.get("tenant", ANYBODY)
    job.request_id, job.tenant, job.key_hash = state.get("request_id", ""), tenant.name, tenant.key_hash
    job.limits = tenant.limits
    return GenerationResponse(service, job)


def _chat_job(data: bytes, service: ApiService) -> Job:
    body = parse(ChatRequest, data)
    return chat_job(body, service.settings.max_json_depth, service.fleet.dialect(body.model))


@router.post("/v1/chat/completions", openapi_extra=_described(ChatRequest))
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    return await _respond(request, _chat_job)


@router.post("/v1/completions", openapi_extra=_described(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue a text."""
    return await _respond(request, lambda d, s: completion_job(parse(CompletionRequest, d), s.settings.max_json_depth))


@router.post("/generate", openapi_extra=_described(GenerateRequest))
async def generate(request: Request) -> Response:
    """Continue a text, streamed as plain lines."""
    return await _respond(
        request,
        lambda d, s: generate_job(parse(GenerateRequest, d), s.settings.served_model_name, s.settings.max_json_depth),
    )
