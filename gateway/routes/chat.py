"""`POST /v1/chat/completions`: streamed or buffered, or the rest of a reply with `Last-Event-ID`.

A client that leaves before the headers, or while it waits for a buffered reply, has nothing to come
back with: its reply is cancelled at once.
"""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from gateway.chat_spec import make_spec
from gateway.context import Gateway, gateway_of
from gateway.errors import Unavailable, from_log, headers_for
from gateway.event_log import EventLogError
from gateway.event_stream import HEADERS, EventStream
from gateway.formats.chat import ChatFold, ChatFormat, error_json
from gateway.owned_reply import OwnedReply
from gateway.requests import ChatRequest, parse_chat_request, read_body
from gateway.routes.resume import open_stream, resume
from gateway.server_span import end_span, ends_on_error, start_server_span
from gateway.sse import Cursor, parse_cursor

ROUTE = "/v1/chat/completions"

T = TypeVar("T")


async def chat_completions(request: Request) -> Response | EventStream:
    """See the module's docstring."""
    arrived = time.monotonic()
    gateway = gateway_of(request)
    event_id = request.headers.get("last-event-id")
    if event_id is not None:
        cursor = parse_cursor(event_id, "Last-Event-ID")
        empty_stream = Response(headers={**HEADERS, "location": f"/v1/streams/{cursor.reply_id}"})
        return await resume(gateway, request, ROUTE, cursor, "chat", at_end=empty_stream)
    span = start_server_span(gateway.telemetry.tracer, request, ROUTE)
    with ends_on_error(span):
        owner = gateway.api_keys.owner(request.headers)
        chat = parse_chat_request(await read_body(request, gateway.settings.max_body_bytes))
        reply = await _while_connected(request, _start(gateway, chat, owner, arrived))
        if await request.is_disconnected():  # it left in the moment of the admission
            await gateway.hub.cancel(reply.meta.reply_id)
            raise ClientDisconnect
        if not chat.stream:
            response = await _buffered(gateway, request, reply)
            end_span(span, response.status_code)
            return response
        headers = {} if reply.resumable else {"baton-resumable": "false"}
        rendering = ChatFormat(reply.meta, include_usage=chat.include_usage)
        start = Cursor(reply.meta.reply_id, 0)
        return open_stream(
            gateway, reply.meta, start, rendering, headers=headers, on_end=lambda: end_span(span, 200)
        )


async def _start(gateway: Gateway, chat: ChatRequest, owner: str, arrived: float) -> OwnedReply:
    log_down = Unavailable("The event log is down, and this gateway takes no requests without it.")
    require_log = gateway.settings.require_log
    if require_log and gateway.hub.degraded:
        raise log_down
    spec = await make_spec(
        chat,
        model=gateway.model,
        tokenizer=gateway.tokenizer,
        owner_hash=owner,
        request_timeout_s=gateway.settings.request_timeout_s,
    )
    reply = await gateway.generations.start(spec, arrived=arrived)
    if require_log and not reply.resumable:  # the one that found out
        await gateway.hub.cancel(reply.meta.reply_id)
        raise log_down
    return reply


async def _buffered(gateway: Gateway, request: Request, reply: OwnedReply) -> Response:
    try:
        fold = await _while_connected(request, _fold(gateway, reply))
    except ClientDisconnect:
        await gateway.hub.cancel(reply.meta.reply_id)
        raise
    except EventLogError as error:
        raise from_log(error) from error
    location = {"location": f"/v1/streams/{reply.meta.reply_id}"}
    if fold.error is None:
        return JSONResponse(fold.body(), headers=location)
    status = fold.error["status"]
    return JSONResponse({"error": error_json(fold.error)}, status, headers=location | headers_for(status))


async def _fold(gateway: Gateway, reply: OwnedReply) -> ChatFold:
    fold = ChatFold(reply.meta)
    reply_id = reply.meta.reply_id
    async with gateway.hub.attach(reply_id), aclosing(gateway.hub.read(reply_id, 0)) as pages:
        async for page in pages:
            fold.add(page)
    return fold


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; cancels it and raises ClientDisconnect if the client leaves first."""
    working = asyncio.create_task(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
