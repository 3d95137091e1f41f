"""`GET /v1/models`: the one model that the workers serve."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.context import gateway_of
from gateway.errors import NotFound
from gateway.router import ServedModel


async def list_models(request: Request) -> Response:
    """OpenAI's list."""
    gateway = gateway_of(request)
    gateway.api_keys.owner(request.headers)
    return JSONResponse({"object": "list", "data": [_model_json(gateway.model)]})


async def read_model(request: Request) -> Response:
    """One of the list. Raises NotFound."""
    gateway = gateway_of(request)
    gateway.api_keys.owner(request.headers)
    name = request.path_params["id"]
    if name != gateway.model.name:
        raise NotFound(f"The model `{name}` does not exist.", param="model", code="model_not_found")
    return JSONResponse(_model_json(gateway.model))


def _model_json(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "max_model_len": model.max_model_len,
    }
