"""The HTTP server process: uvicorn, with a drain that can be watched and an abort that tells the truth."""

import asyncio
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_UNSENT_BYTES = 16 * 1024  # a connection; above it the stream waits
ABORT = "baton.abort"  # in the scope's extensions: drops the connection, unsent bytes included


class AbortableProtocol(HttpToolsProtocol):
    """Bounds what waits unsent, and lets a response drop its connection.

    Closing it would wait for a client that reads nothing.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope.setdefault("extensions", {})[ABORT] = self.transport.abort


class GatewayServer(uvicorn.Server):
    """Tells when the drain begins."""

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_drain = on_drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_drain()
        super().handle_exit(sig, frame)


def make_server(app: ASGIApp, listen: str, drain_s: float, on_drain: Callable[[], None]) -> GatewayServer:
    """A server on `host:port`. On SIGTERM it stops accepting, and ends open streams after `drain_s`."""
    host, _, port = listen.rpartition(":")
    config = uvicorn.Config(
        app,
        host=host.strip("[]"),
        port=int(port),
        http=AbortableProtocol,
        ws="none",
        access_log=False,
        log_config=None,  # structlog has it
        server_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return GatewayServer(config, on_drain)
