"""A gRPC server with health, reflection and an orderly end.

Draining, in order: health turns NOT_SERVING and `draining` is set (servicers refuse new work, the
load stream tells routers), work in progress runs on until it is done or the drain deadline passes,
then the server closes. Knows nothing of what the servicers do.
"""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from services.rpc.channel import DEFAULT_PINGS, Pings, server_options

log = structlog.get_logger()


class Lifecycle:
    """Counts calls in progress and says when no more may begin."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def track(self) -> Iterator[None]:
        """Holds the drain while one call is at work."""
        self.num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if not self.num_active:
                self._idle.set()

    async def idle(self) -> None:
        """Waits until no tracked call is left."""
        await self._idle.wait()


class RpcServer:
    """Serves the services that the caller adds to `server`.

    Args:
        listen: `host:port`; port 0 picks a free one.
        service_names: full names, for health and reflection.
        drain_s: how long work in progress may run on after SIGTERM or SIGINT.
        pings: when a caller that says nothing counts as gone.
    """

    def __init__(
        self,
        listen: str,
        service_names: Sequence[str],
        interceptors: Sequence[aio.ServerInterceptor] = (),
        drain_s: float = 25.0,
        pings: Pings = DEFAULT_PINGS,
    ) -> None:
        self.lifecycle = Lifecycle()
        self.server = aio.server(options=server_options(pings), interceptors=list(interceptors))
        self._listen = listen
        self._drain_s = drain_s
        self._service_names = ("", *service_names)
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            (
                *service_names,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ),
            self.server,
        )

    async def start(self) -> str:
        """Binds, serves and reports SERVING; returns the bound `host:port`.

        Raises RuntimeError if the address cannot be bound.
        """
        port = self.server.add_insecure_port(self._listen)
        await self.server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return f"{self._listen.rpartition(':')[0]}:{port}"

    async def run_until_signal(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains and stops."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        await stop.wait()
        await self.drain()

    async def drain(self) -> None:
        """Refuses new work, lets work in progress end within the deadline, closes."""
        log.info("draining", active=self.lifecycle.num_active, deadline_s=self._drain_s)
        self.lifecycle.draining.set()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            async with asyncio.timeout(self._drain_s):
                await self.lifecycle.idle()
        except TimeoutError:
            log.warning("drain deadline passed", aborted=self.lifecycle.num_active)
        # The load streams of routers never end by themselves; a moment is all they get.
        await self.server.stop(grace=0.2)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in self._service_names:
            await self._health.set(name, status)
