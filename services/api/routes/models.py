"""The models that are served here."""

from typing import Any

from fastapi import APIRouter, Request

from services.api.admission import no_such_model
from services.api.answer_schema import ModelCard, ModelList
from services.api.openapi import described
from services.api.service import ApiService

router = APIRouter()


def _model(service: ApiService, name: str, created: int) -> dict[str, Any]:
    context = service.fleet.load(name).max_seq_len
    entry: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "millrace"}
    return {**entry, "max_model_len": context} if context else entry


@router.get("/v1/models", openapi_extra=described(None, ModelList))
async def list_models(request: Request) -> dict[str, Any]:
    """List them."""
    service: ApiService = request.app.state.service
    return {"object": "list", "data": [_model(service, name, at) for name, at in service.fleet.models.items()]}


@router.get("/v1/models/{name:path}", openapi_extra=described(None, ModelCard))
async def get_model(name: str, request: Request) -> dict[str, Any]:
    """Describe one; ids may hold slashes, plain or escaped."""
    service: ApiService = request.app.state.service
    created = service.fleet.models.get(name)
    if created is None:
        raise no_such_model(service.fleet, name)
    return _model(service, name, created)
