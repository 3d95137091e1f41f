"""Starts a decode worker: `python -m services.decode`, configured by `BATON_*` variables.

With `BATON_LOCAL_PREFILL=always` it is the colocated worker: prefill and decode in one process.
"""

import asyncio
from collections.abc import Awaitable, Callable

from grpc import aio

from baton.v1 import common_pb2, decode_pb2_grpc
from services.decode.servicer import DecodeServicer
from services.settings import LocalPrefill, WorkerSettings
from services.worker import Worker, serve


def add_servicer(worker: Worker, server: aio.Server) -> Callable[[], Awaitable[None]]:
    """Adds the Decode service; returns what closes its channels to prefill workers."""
    servicer = DecodeServicer(worker)
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    return servicer.close


if __name__ == "__main__":
    local = WorkerSettings.load().local_prefill
    role = common_pb2.ROLE_COLOCATED if local is LocalPrefill.ALWAYS else common_pb2.ROLE_DECODE
    asyncio.run(serve(role, "baton.v1.Decode", add_servicer))
