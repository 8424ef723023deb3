"""The three routes that generate text: chat, completions, and the plain interface."""

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.api.answer_schema import ChatCompletion, PlainAnswer, TextCompletion
from services.api.auth import Tenant
from services.api.body import RESUME, read_body, read_timeout, read_traceparent, wants_resume
from services.api.intake import chat_job, completion_job, generate_job
from services.api.job import Job
from services.api.openapi import described
from services.api.resuming import ResumableResponse, check_resumable
from services.api.schema import ChatRequest, CompletionRequest, GenerateRequest, parse
from services.api.service import ApiService
from services.api.streaming import GenerationResponse

router = APIRouter()

_RESUMABLE: Final[dict[str, Any]] = {
    "parameters": [
        {
            "name": RESUME, "in": "header", "required": False, "schema": {"type": "string", "enum": ["0", "1"]},
            "description": "1: give every event of the stream an id to come back to, at /v1/streams/{response}",
        }
    ]
}  # fmt: skip


def sign(request: Request, job: Job, cost_bytes: int) -> Job:
    """Note on a job whose it is and how it is to be followed."""
    state = request.scope["state"]
    tenant: Tenant = state["tenant"]
    job.request_id, job.traceparent = state["request_id"], read_traceparent(request)
    job.tenant, job.key_hash, job.limits = tenant.name, tenant.key_hash, tenant.limits
    job.cost_bytes = cost_bytes
    return job


async def _respond(request: Request, make: Callable[[bytes, ApiService], Job]) -> Response:
    """Read, parse and check a request; its answer is made by the response itself."""
    service: ApiService = request.app.state.service
    resumable = wants_resume(request)
    data = await read_body(request, service.settings)
    job = sign(request, make(data, service), len(data))
    job.timeout_s = read_timeout(request, job.timeout_s)
    if resumable:
        check_resumable(job)
        job.resume_ms = int(service.settings.resume_for * 1000)
        return ResumableResponse(service, job)
    return GenerationResponse(service, job)


def _chat_job(data: bytes, service: ApiService) -> Job:
    body = parse(ChatRequest, data)
    return chat_job(body, service.settings.max_json_depth, service.fleet.dialect(body.model))


@router.post("/v1/chat/completions", openapi_extra=described(ChatRequest, ChatCompletion, streams=True) | _RESUMABLE)
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    return await _respond(request, _chat_job)


@router.post("/v1/completions", openapi_extra=described(CompletionRequest, TextCompletion, streams=True) | _RESUMABLE)
async def completions(request: Request) -> Response:
    """Continue a text."""
    return await _respond(request, lambda d, s: completion_job(parse(CompletionRequest, d), s.settings.max_json_depth))


@router.post("/generate", openapi_extra=described(GenerateRequest, PlainAnswer, streams=True))
async def generate(request: Request) -> Response:
    """Continue a text, streamed as plain lines."""
    return await _respond(
        request,
        lambda d, s: generate_job(parse(GenerateRequest, d), s.settings.served_model_name, s.settings.max_json_depth),
    )
