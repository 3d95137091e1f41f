"""A bare gRPC stream: messages that are ready in memory, no protobuf, nobody who looks at them.

`python -m bench.transfer.raw ADDRESS` serves it in a process of its own.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc import aio

from bench.errors import BenchFailed
from services.rpc.channel import channel_options, server_options

_METHOD = "/bench.Raw/Stream"
_READY = "ready"
_CONNECT_S = 10.0
_GONE = "the server of the bare stream does not answer any more"


async def time_asyncio(address: str, num_messages: int, num_bytes: int) -> float:
    """Seconds until all messages have been received by an asyncio client."""
    async with aio.insecure_channel(address, options=channel_options()) as channel:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await channel.channel_ready()
        except TimeoutError as error:
            raise BenchFailed(_GONE) from error
        stream: aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_METHOD)
        began = time.perf_counter()
        received = 0
        async for message in stream(_request(num_messages, num_bytes)):
            received += len(message)
        seconds = time.perf_counter() - began
    _check(received, num_messages * num_bytes)
    return seconds


def time_threaded(address: str, num_messages: int, num_bytes: int) -> float:
    """The same by gRPC's other client."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)
        except grpc.FutureTimeoutError as error:
            raise BenchFailed(_GONE) from error
        stream: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_METHOD)
        began = time.perf_counter()
        received = sum(len(message) for message in stream(_request(num_messages, num_bytes)))
        seconds = time.perf_counter() - began
    _check(received, num_messages * num_bytes)
    return seconds


@contextmanager
def serving(address: str) -> Iterator[None]:
    """The server's process, ready."""
    command = [sys.executable, "-m", "bench.transfer.raw", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != _READY:
                raise BenchFailed("the server of the bare stream did not start")
            yield
        finally:
            process.terminate()


def _request(num_messages: int, num_bytes: int) -> bytes:
    return f"{num_messages} {num_bytes}".encode()


def _check(received: int, expected: int) -> None:
    if received != expected:
        raise BenchFailed(f"the bare stream brought {received} bytes, not {expected}")


class _Raw(grpc.GenericRpcHandler):
    """Sends the messages that are asked for; each has memory of its own, as pages do."""

    def __init__(self) -> None:
        self._messages: dict[bytes, list[bytes]] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails):  # type: ignore[no-untyped-def]
        """See gRPC."""
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _stream(self, request: bytes, context: "aio.ServicerContext[bytes, bytes]") -> None:
        if request not in self._messages:
            num_messages, num_bytes = map(int, request.split())
            self._messages = {request: [bytes([n % 255 + 1]) * num_bytes for n in range(num_messages)]}
        for message in self._messages[request]:
            await context.write(message)


async def _serve(address: str) -> None:
    server = aio.server(options=server_options())
    server.add_generic_rpc_handlers((_Raw(),))
    server.add_insecure_port(address)
    await server.start()
    print(_READY, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
