"""Starts a prefill worker: `python -m services.prefill`, configured by `BATON_*` variables."""

import asyncio
from collections.abc import Awaitable, Callable

from grpc import aio

from baton.v1 import common_pb2
from services.kv.data_server import DataServer
from services.kv.service import add_to_server
from services.prefill.servicer import PrefillServicer
from services.settings import KvTransport, WorkerSettings
from services.worker import Worker, serve


def add_servicer(worker: Worker, server: aio.Server) -> Callable[[], Awaitable[None]]:
    """Adds the Prefill service; returns what closes the port that pages are fetched at.

    Raises SystemExit if that cannot be bound.
    """
    data_server = None
    if worker.settings.kv_transport is not KvTransport.GRPC:
        data_server = _data_server(worker.settings)
        worker.data_port = data_server.port
    add_to_server(PrefillServicer(worker, data_server), server)

    async def close() -> None:
        if data_server is not None:
            await data_server.close()

    return close


def _data_server(settings: WorkerSettings) -> DataServer:
    host = settings.listen.rpartition(":")[0]
    try:
        return DataServer(host, settings.kv_port)
    except OSError as error:
        raise SystemExit(f"BATON_KV_PORT: {host}:{settings.kv_port} cannot be bound: {error}") from error


if __name__ == "__main__":
    asyncio.run(serve(common_pb2.ROLE_PREFILL, "baton.v1.Prefill", add_servicer))
