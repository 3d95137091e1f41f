"""Prefill and decode workers as real gRPC servers on loopback, with simulated engines, in one process.

Blocks, pages, checksums, calls and cancellations are real; only the token delays are not.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio

from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from observability.telemetry import setup
from services.decode.__main__ import add_servicer as add_decode
from services.engine.factory import create_engine
from services.engine.sim_model import write_sim_model
from services.prefill.__main__ import add_servicer as add_prefill
from services.rpc.interceptors import TracingServerInterceptor
from services.rpc.server import RpcServer
from services.settings import EngineKind, WorkerSettings
from services.worker import Worker, engine_config

AddServicer = Callable[[Worker, aio.Server], Callable[[], Awaitable[None]]]


@dataclass(slots=True)
class RunningWorker:
    """A worker and where it listens."""

    worker: Worker
    address: str
    server: RpcServer

    @property
    def blocks_used(self) -> int:
        return self.worker.engine.load().blocks_used


@asynccontextmanager
async def running_worker(
    model: Path, role: "common_pb2.Role.ValueType", add_servicer: AddServicer, name: str, **overrides: object
) -> AsyncIterator[RunningWorker]:
    """One worker; `overrides` are fields of `WorkerSettings`."""
    values = {
        "model": model,
        "engine": EngineKind.SIM,
        "sim_token_ms": 1.0,
        "sim_jitter_ms": 0.0,
        **overrides,
    }
    settings = WorkerSettings.model_validate(values)
    telemetry = setup(name, instance="test")
    engine = create_engine(engine_config(settings, role), settings.engine.value)
    await engine.start()
    server = RpcServer("127.0.0.1:0", (name,), (TracingServerInterceptor(telemetry.tracer),), drain_s=5)
    worker = Worker(settings, engine, telemetry, server.lifecycle, role)
    close = add_servicer(worker, server.server)
    address = await server.start()
    try:
        yield RunningWorker(worker, address, server)
    finally:
        await server.server.stop(None)
        await close()
        await engine.close()
        telemetry.shutdown()


@dataclass(slots=True)
class Cluster:
    """Workers of both roles and a stub for the first decode worker."""

    prefill: list[RunningWorker] = field(default_factory=list)
    decode: list[RunningWorker] = field(default_factory=list)
    stub: "decode_pb2_grpc.DecodeAsyncStub" = None  # type: ignore[assignment]

    @property
    def targets(self) -> list[str]:
        return [worker.address for worker in self.prefill]

    @property
    def blocks_used(self) -> int:
        return sum(worker.blocks_used for worker in (*self.prefill, *self.decode))


@asynccontextmanager
async def running_cluster(
    folder: Path,
    num_prefill: int = 1,
    local_prefill: str = "never",
    write_model: Callable[[Path], None] = write_sim_model,
    **overrides: object,
) -> AsyncIterator[Cluster]:
    """Starts the workers; `overrides` go to every worker."""
    model = folder / "baton-sim"
    write_model(model)
    cluster = Cluster()
    async with AsyncExitStack() as stack:
        for _ in range(num_prefill):
            prefill = running_worker(
                model, common_pb2.ROLE_PREFILL, add_prefill, "baton.v1.Prefill", **overrides
            )
            cluster.prefill.append(await stack.enter_async_context(prefill))
        decode = running_worker(
            model,
            common_pb2.ROLE_DECODE,
            add_decode,
            "baton.v1.Decode",
            local_prefill=local_prefill,
            **overrides,
        )
        cluster.decode.append(await stack.enter_async_context(decode))
        channel = await stack.enter_async_context(aio.insecure_channel(cluster.decode[0].address))
        cluster.stub = decode_pb2_grpc.DecodeStub(channel)
        yield cluster


def generate_request(
    reply_id: str = "reply-aaaaaaaaaaaaaaaa", num_prompt_tokens: int = 100, **changes: object
) -> decode_pb2.GenerateRequest:
    """A request for 40 seeded pseudo-random words; `changes` are fields of the message or of sampling."""
    sampling = common_pb2.SamplingParams(temperature=1.0, top_p=1.0, seed=7, max_tokens=40)
    request = decode_pb2.GenerateRequest(
        reply_id=reply_id,
        epoch=1,
        prompt_token_ids=[(7 * i) % 200 for i in range(num_prompt_tokens)],
        sampling=sampling,
    )
    for name, value in changes.items():
        owner = request.sampling if name in common_pb2.SamplingParams.DESCRIPTOR.fields_by_name else request
        if isinstance(value, (list, tuple)):
            getattr(owner, name).extend(value)
        else:
            setattr(owner, name, value)
    return request


@dataclass(slots=True)
class Reply:
    """What one Generate call delivered."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finished: decode_pb2.Finished | None = None
    first_timings: decode_pb2.FirstTextTimings | None = None


async def collect(call: "aio.UnaryStreamCall[Any, decode_pb2.GenerateMessage]") -> Reply:
    """Reads a call to its end, from wherever `read` has left it."""
    reply = Reply()
    while (message := await call.read()) is not aio.EOF:
        if message.WhichOneof("message") == "delta":
            assert message.delta.text, "an empty delta"
            if reply.first_timings is None:
                reply.first_timings = message.delta.timings
            reply.text += message.delta.text
            reply.token_ids += [token.token_id for token in message.delta.tokens]
        else:
            reply.finished = message.finished
            reply.token_ids += [token.token_id for token in message.finished.tokens]
    return reply
