"""The HTTP server process: uvicorn, with a drain that can be watched and an abort that tells the truth."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_UNSENT_BYTES = 16 * 1024  # a connection; above it the stream waits
ABORT = "baton.abort"  # in the scope's extensions: drops the connection, unsent bytes included


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, with bounds on what a client may make a connection hold, and for how long.

    What waits unsent is bounded, and so is a head (or a trailer) that does not end. While the client
    is to move (send the rest of its request, or the next one, or take the rest of its response) and
    does not for `stalled_client_s`, the connection is aborted; closing it would wait for such a client.
    A response that waits for the client itself can abort as well (`ABORT`).
    """

    def __init__(self, *args: Any, stalled_client_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stalled_client_s = stalled_client_s
        self._patience: asyncio.TimerHandle | None = None
        self._num_unsent = 0  # bytes, when the patience began
        self._num_undelivered = 0  # bytes received since anything was passed on

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._expect_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect_nothing()

    def data_received(self, data: bytes) -> None:
        self._num_undelivered += len(data)
        super().data_received(data)
        if self._num_undelivered <= MAX_HEAD_BYTES or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("The request's head is too large.")
        else:  # never a second answer into the first
            self.transport.abort()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope.setdefault("extensions", {})[ABORT] = self.transport.abort
        self._expect_client()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._expect_client()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expect_client()
        if not self.cycle.response_complete:
            self._expect_nothing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete or self.cycle.more_body:  # else a pipelined request is served now
            self._expect_client()

    def _expect_client(self) -> None:
        self._num_undelivered = 0
        self._expect_nothing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._patience = self.loop.call_later(self._stalled_client_s, self._patience_ends)

    def _expect_nothing(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def _patience_ends(self) -> None:
        takes = self.transport.get_write_buffer_size() < self._num_unsent
        if takes or self.flow.read_paused:  # paused: it is the server that does not read on
            self._expect_client()
        else:
            self.transport.abort()


class GatewayServer(uvicorn.Server):
    """Tells when the drain begins."""

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_drain = on_drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_drain()
        super().handle_exit(sig, frame)


def make_server(
    app: ASGIApp, listen: str, *, drain_s: float, stalled_client_s: float, on_drain: Callable[[], None]
) -> GatewayServer:
    """A server on `host:port`. On SIGTERM it stops accepting, and ends open streams after `drain_s`."""
    host, _, port = listen.rpartition(":")
    config = uvicorn.Config(
        app,
        host=host.strip("[]"),
        port=int(port),
        http=partial(BoundedProtocol, stalled_client_s=stalled_client_s),  # type: ignore[arg-type]
        ws="none",
        access_log=False,
        log_config=None,  # structlog has it
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return GatewayServer(config, on_drain)
