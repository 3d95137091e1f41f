"""`/v1/streams/{id}`: resume, look at and cancel a reply, on whichever gateway is asked."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.context import Gateway, gateway_of
from gateway.errors import InvalidRequest, from_log
from gateway.event_log import EventLogError
from gateway.event_stream import EventStream
from gateway.events import Event
from gateway.formats.chat import ChatFold
from gateway.routes.resume import find_reply, resume
from gateway.sse import Cursor, parse_cursor

ROUTE = "/v1/streams/{id}"


async def read_stream(request: Request) -> Response | EventStream:
    """Replay after `Last-Event-ID` or `?after=` (the header wins), then live; from the start without."""
    gateway = gateway_of(request)
    reply_id = request.path_params["id"]
    cursor = Cursor(reply_id, 0)
    for name, value in (
        ("Last-Event-ID", request.headers.get("last-event-id")),
        ("after", request.query_params.get("after")),
    ):
        if value:
            cursor = parse_cursor(value, name)
            if cursor.reply_id != reply_id:
                raise InvalidRequest(f"`{name}` is an event ID of another stream.", param=name)
            break
    # 204 stops a browser's EventSource, which would reconnect for ever.
    nothing_left = Response(status_code=204)
    return await resume(
        gateway, request, ROUTE, cursor, request.query_params.get("format", ""), at_end=nothing_left
    )


async def read_state(request: Request) -> Response:
    """Where a reply stands: status, text so far, usage, timings."""
    gateway = gateway_of(request)
    reply_id = request.path_params["id"]
    meta = await find_reply(gateway, reply_id, gateway.api_keys.owner(request.headers))
    try:
        state = await gateway.hub.state(reply_id)
        events = await _events(gateway, reply_id, state.last_seq)
    except EventLogError as error:
        raise from_log(error) from error
    fold = ChatFold(meta)
    fold.add(events)
    body = fold.body()
    choice: dict[str, Any] = body["choices"][0] if body["choices"] else {}
    last: dict[str, Any] = events[-1].payload if events and events[-1].is_terminal else {}
    return JSONResponse(
        {
            "id": reply_id,
            "status": state.status.value,
            "text": choice["message"]["content"] if choice else "",
            "finish_reason": choice.get("baton_finish_reason") or choice.get("finish_reason"),
            "usage": body["usage"] or None,
            "timings": last.get("timings", {}),
            "first_seq": min(1, state.last_seq),
            "last_seq": state.last_seq,
            "owner_epoch": state.epoch,
        }
    )


async def cancel_stream(request: Request) -> Response:
    """Ends a reply, wherever it is generated. Idempotent."""
    gateway = gateway_of(request)
    reply_id = request.path_params["id"]
    await find_reply(gateway, reply_id, gateway.api_keys.owner(request.headers))
    try:
        await gateway.hub.cancel(reply_id)
        state = await gateway.hub.state(reply_id)
    except EventLogError as error:
        raise from_log(error) from error
    return JSONResponse({"id": reply_id, "status": state.status.value, "cancel_requested": True})


async def _events(gateway: Gateway, reply_id: str, last_seq: int) -> list[Event]:
    """The log up to `last_seq`, without waiting for more."""
    owned = gateway.hub.owned(reply_id)
    if owned is not None and not owned.fenced:
        return owned.events[:last_seq]
    events: list[Event] = []
    while len(events) < last_seq and (page := await gateway.hub.log.read(reply_id, len(events))):
        events += page
    return events[:last_seq]
