"""One client's stream: reads the log at its own pace and writes frames until the reply or the client ends.

Invariant: a body without the terminal event is left visibly unfinished, whatever stopped it (a slow
client, a drain, a log that failed): the connection is aborted, the chunked body never closed.
Must not know: generations. A slow or gone client stops nothing but its own stream.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from starlette.types import Message, Receive, Scope, Send

from gateway.event_log import EventLogError
from gateway.events import Event, EventKind
from gateway.formats import Format
from gateway.keepalive import KEEPALIVES, KeepaliveMode
from gateway.replies import ReplyHub
from gateway.server import ABORT
from gateway.sse import encode_event
from observability.metrics import Metrics

log = structlog.get_logger()

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hand on the stream in pages
}


class StreamAborted(Exception):
    """The stream ends here without its terminal event; the server drops the connection."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a stream is held to. Seconds."""

    keepalive_s: float
    keepalive_mode: KeepaliveMode
    slow_client_s: float


class EventStream:
    """An ASGI response.

    Args:
        pages: the events to send, already positioned; closed at the end.
        on_end: called once when the stream is over, whichever way.
    """

    def __init__(
        self,
        hub: ReplyHub,
        reply_id: str,
        format: Format,
        pages: AsyncGenerator[list[Event], None],
        *,
        settings: StreamSettings,
        metrics: Metrics,
        headers: Mapping[str, str],
        on_end: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._reply_id = reply_id
        self._format = format
        self._pages = pages
        self._settings = settings
        self._metrics = metrics
        self._headers = {**HEADERS, "location": f"/v1/streams/{reply_id}", **headers}
        self._on_end = on_end
        self._clock = clock
        self._first_text_sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._hub.attach(self._reply_id), aclosing(self._pages):
                await self._run(receive, send)
        except StreamAborted as error:
            log.info("stream aborted", reply=self._reply_id, reason=str(error))
            abort = scope.get("extensions", {}).get(ABORT)
            if abort is None:
                raise
            abort()
            await _disconnected(receive)
        finally:
            self._on_end()

    async def _run(self, receive: Receive, send: Send) -> None:
        """Writes until the reply has ended or the client has left. Raises StreamAborted."""
        writing = asyncio.create_task(self._write(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self._headers.items()]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        pages = aiter(self._pages)
        next_page = asyncio.ensure_future(anext(pages, None))
        keepalive = KEEPALIVES.get(self._settings.keepalive_mode or self._format.keepalive_mode)
        due = self._clock() + self._settings.keepalive_s
        try:
            while True:
                timeout_s = max(0.0, due - self._clock()) if keepalive else None
                done, _ = await asyncio.wait({next_page}, timeout=timeout_s)
                if keepalive and self._clock() >= due:
                    await self._send(send, _part(keepalive))
                    due = self._clock() + self._settings.keepalive_s
                if not done:
                    continue
                page = next_page.result()
                if page is None:
                    raise StreamAborted("the log ended without a terminal event")
                if await self._send_page(send, page):
                    return
                next_page = asyncio.ensure_future(anext(pages, None))
        except EventLogError as error:
            raise StreamAborted(f"the log failed: {error}") from error
        finally:
            next_page.cancel()
            await asyncio.gather(next_page, return_exceptions=True)

    async def _send_page(self, send: Send, page: list[Event]) -> bool:
        """Sends a page, one event a send; True after the terminal one."""
        for event in page:
            frame = encode_event(self._reply_id, event, self._format)
            if frame is not None:
                await self._send(send, _part(frame))
            if event.kind is EventKind.DELTA and not self._first_text_sent:
                self._note_first_text()
            if event.is_terminal:
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
                return True
        return False

    async def _send(self, send: Send, message: Message) -> None:
        """Raises StreamAborted if the socket accepts nothing for too long, the end of the body included."""
        try:
            async with asyncio.timeout(self._settings.slow_client_s):
                await send(message)
        except TimeoutError:
            self._metrics.slow_client()
            raise StreamAborted("the client reads too slowly") from None

    def _note_first_text(self) -> None:
        self._first_text_sent = True
        reply = self._hub.owned(self._reply_id)
        if reply is not None and reply.first_text_sent_at is None:
            reply.first_text_sent_at = self._clock()


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
