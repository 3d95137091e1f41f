"""The ASGI application: routes, and the one way from an exception to an answer.

Pure ASGI throughout: a middleware that wraps the response would hide that the client has left.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.context import Gateway
from gateway.errors import GatewayError, InternalError, InvalidRequest, MethodNotAllowed, NotFound
from gateway.routes import chat, models, probes, streams

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def create_app(gateway: Gateway, lifespan: Lifespan | None = None) -> Starlette:
    """The application of one gateway. `lifespan` starts and ends what the gateway consists of."""
    app = Starlette(
        routes=[
            Route(chat.ROUTE, chat.chat_completions, methods=["POST"]),
            Route("/v1/models", models.list_models),
            Route("/v1/models/{id:path}", models.read_model),
            Route(streams.ROUTE, streams.read_stream),
            Route("/v1/streams/{id}/state", streams.read_state),
            Route("/v1/streams/{id}/cancel", streams.cancel_stream, methods=["POST"]),
            Route("/livez", probes.livez),
            Route("/readyz", probes.readyz),
            Route("/metrics", probes.metrics),
            Route("/", probes.chat_page),
        ],
        exception_handlers={
            GatewayError: _answer_gateway_error,
            HTTPException: _answer_http_exception,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_fault,
        },
        lifespan=lifespan or _no_lifespan,
    )
    app.state.gateway = gateway
    return app


@asynccontextmanager
async def _no_lifespan(app: Starlette) -> AsyncIterator[None]:
    yield


def answer(error: GatewayError) -> Response:
    """OpenAI's error JSON with the table's status and headers."""
    return JSONResponse(error.body(), error.shape.status, headers=dict(error.shape.headers))


async def _answer_gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return answer(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    kinds: dict[int, type[GatewayError]] = {404: NotFound, 405: MethodNotAllowed}
    kind = kinds.get(error.status_code, InvalidRequest)
    response = answer(kind(f"{request.method} {request.url.path}: {error.detail}."))
    response.headers.update(error.headers or {})
    return response


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client has left: nothing that is said now arrives."""
    return Response(status_code=499)


async def _answer_fault(request: Request, error: Exception) -> Response:
    return answer(InternalError("This server has made a mistake; the request was not at fault."))
