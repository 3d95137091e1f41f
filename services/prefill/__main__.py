"""Starts a prefill worker: `python -m services.prefill`, configured by `BATON_*` variables."""

import asyncio
from collections.abc import Awaitable, Callable

from grpc import aio

from baton.v1 import common_pb2
from services.kv.service import add_to_server
from services.prefill.servicer import PrefillServicer
from services.worker import Worker, serve


def add_servicer(worker: Worker, server: aio.Server) -> Callable[[], Awaitable[None]]:
    """Adds the Prefill service; it holds nothing that needs closing."""
    add_to_server(PrefillServicer(worker), server)

    async def close() -> None:
        return None

    return close


if __name__ == "__main__":
    asyncio.run(serve(common_pb2.ROLE_PREFILL, "baton.v1.Prefill", add_servicer))
