"""Resuming a reply: from a cursor to a stream of the rest, for every route that offers it."""

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from gateway.auth import check_owner
from gateway.context import Gateway
from gateway.errors import CursorAhead, GatewayError, InvalidRequest, Overloaded, from_log
from gateway.event_log import EventLogError, ReplyMeta
from gateway.event_stream import HEADERS, EventStream
from gateway.formats import Format
from gateway.formats.registry import format_named
from gateway.server_span import end_span, ends_on_error, start_server_span
from gateway.sse import Cursor


async def find_reply(gateway: Gateway, reply_id: str, caller: str) -> ReplyMeta:
    """The reply's meta, if the caller owns it. Raises NotFound, ReplyExpired, Unavailable."""
    try:
        meta = await gateway.hub.meta(reply_id)
    except EventLogError as error:
        raise from_log(error) from error
    check_owner(meta.owner_hash, caller)
    return meta


async def resume(
    gateway: Gateway, request: Request, route: str, cursor: Cursor, format_name: str, at_end: Response
) -> Response | EventStream:
    """The stream after the cursor.

    Args:
        format_name: empty for the format that the reply was created in.
        at_end: what to answer if nothing comes after the cursor.
    """
    outcome = "error"
    try:
        caller = gateway.api_keys.owner(request.headers)
        await _wait_for_event(gateway, cursor)
        meta = await find_reply(gateway, cursor.reply_id, caller)
        span = start_server_span(gateway.telemetry.tracer, request, route, linked_to=meta.traceparent)
        with ends_on_error(span):
            finished = await _check(gateway, cursor)
            if finished:
                end_span(span, at_end.status_code)
                outcome = "nothing_left"
                return at_end
            if request.method == "HEAD":  # a look at the headers is no reader
                end_span(span, 200)
                outcome = "ok"
                return Response(headers={**HEADERS, "location": f"/v1/streams/{meta.reply_id}"})
            stream = _stream(gateway, meta, cursor, format_name, lambda: end_span(span, 200))
        outcome = "ok"
        return stream
    except GatewayError as error:
        outcome = error.code or error.shape.type
        raise
    finally:
        gateway.telemetry.metrics.resume(outcome)


async def _wait_for_event(gateway: Gateway, cursor: Cursor) -> None:
    """The client has seen that event: if the log has not, its owner may be restoring it just now."""
    if cursor.seq:
        try:
            await gateway.hub.until_logged(cursor.reply_id, cursor.seq, cursor.epoch)
        except EventLogError as error:
            raise from_log(error) from error


async def _check(gateway: Gateway, cursor: Cursor) -> bool:
    """Whether the reply ends exactly at the cursor. Raises CursorAhead if the cursor is not in its log."""
    hub = gateway.hub
    try:
        state = await hub.state(cursor.reply_id)
        if cursor.seq > state.last_seq:
            raise CursorAhead(
                f"The event ID is ahead of the stream, which is at {state.last_seq}.", param="Last-Event-ID"
            )
        if cursor.epoch is not None and cursor.seq:
            owned = hub.owned(cursor.reply_id)
            if owned is not None:
                written_by = owned.events[cursor.seq - 1].epoch
            else:
                written_by = (await hub.log.read(cursor.reply_id, cursor.seq - 1, 1))[0].epoch
            if written_by != cursor.epoch:
                raise CursorAhead("That event was lost with its gateway.", param="Last-Event-ID")
    except EventLogError as error:
        raise from_log(error) from error
    return state.terminal_seq == cursor.seq


def _stream(
    gateway: Gateway, meta: ReplyMeta, cursor: Cursor, format_name: str, on_end: Callable[[], None]
) -> EventStream:
    rendering = format_named(format_name or meta.format, meta)
    if rendering is None:
        raise InvalidRequest(f"`format` is chat or baton, not {format_name!r}.", param="format")
    if gateway.open_streams[cursor.reply_id] >= gateway.settings.max_consumers:
        raise Overloaded("This stream has as many readers as it may.", code="too_many_consumers")
    return open_stream(gateway, meta, cursor, rendering, on_end=on_end)


def open_stream(
    gateway: Gateway,
    meta: ReplyMeta,
    cursor: Cursor,
    rendering: Format,
    *,
    headers: Mapping[str, str] | None = None,
    on_end: Callable[[], None],
) -> EventStream:
    """The response that streams a reply from the cursor on; counted as long as it lasts."""
    reply_id = meta.reply_id
    gateway.open_streams[reply_id] += 1

    def ended() -> None:
        gateway.open_streams[reply_id] -= 1
        if not gateway.open_streams[reply_id]:
            del gateway.open_streams[reply_id]
        on_end()

    return EventStream(
        gateway.hub,
        reply_id,
        rendering,
        gateway.hub.read(reply_id, cursor.seq, cursor.epoch),
        settings=gateway.stream_settings,
        metrics=gateway.telemetry.metrics,
        headers=headers or {},
        on_end=ended,
    )
