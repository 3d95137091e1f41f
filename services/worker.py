"""What a prefill and a decode process have in common: start-up, load reports, an orderly end.

Knows the engine's interface and the RPC server, not what either role does with them.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from grpc import aio

from baton.v1 import common_pb2
from observability import logs
from observability.telemetry import Telemetry, setup
from services.engine.config import EngineConfig
from services.engine.errors import EngineError
from services.engine.factory import create_engine
from services.engine.interface import Engine
from services.kv.resources import KvResources
from services.rpc.channel import Pings
from services.rpc.interceptors import TracingServerInterceptor
from services.rpc.server import Lifecycle, RpcServer
from services.settings import KvTransport, LocalPrefill, WorkerSettings
from services.wire import info_to_proto

log = structlog.get_logger()

_LOAD_INTERVAL_S = 0.1
_LOAD_HEARTBEAT_S = 1.0


@dataclass(slots=True)
class Worker:
    """One process: an engine behind a server. Servicers get this and nothing else."""

    settings: WorkerSettings
    engine: Engine
    telemetry: Telemetry
    lifecycle: Lifecycle
    role: "common_pb2.Role.ValueType"
    kv: KvResources = field(default_factory=KvResources)
    data_port: int = 0  # where decode may fetch the bytes of pages; 0: nowhere
    instance: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def pings(self) -> Pings:
        """When somebody that this worker talks to counts as gone."""
        return Pings(self.settings.ping_s, self.settings.ping_timeout_s)

    def info(self) -> common_pb2.WorkerInfo:
        """Fixed facts about this worker."""
        runs_prompts = (
            self.role == common_pb2.ROLE_PREFILL or self.settings.local_prefill is not LocalPrefill.NEVER
        )
        info = info_to_proto(self.engine.info, self.role, self.instance, runs_prompts=runs_prompts)
        info.data_port = self.data_port
        return info

    def load(self) -> common_pb2.Load:
        """A snapshot of the engine's load and the worker's state."""
        load = self.engine.load()
        return common_pb2.Load(
            running=load.running,
            waiting=load.waiting,
            blocks_used=load.blocks_used,
            blocks_cached=load.blocks_cached,
            blocks_total=load.blocks_total,
            draining=self.lifecycle.draining.is_set(),
            prompt_tokens_computed=load.prompt_tokens_computed,
            tokens_recomputed=load.tokens_recomputed,
            kv_bytes_sent=self.kv.traffic.sent,
            kv_bytes_received=self.kv.traffic.received,
        )

    async def watch_load(self, interval_ms: float) -> AsyncIterator[common_pb2.Load]:
        """The load now, then whenever it changes, and once a second as a sign of life.

        Args:
            interval_ms: how often to look for a change; 0 takes the default.
        """
        interval_s = max(interval_ms / 1000, 0.01) if interval_ms else _LOAD_INTERVAL_S
        sent: common_pb2.Load | None = None
        sent_at = 0.0
        while True:
            load = self.load()
            now = time.monotonic()
            if load != sent or now - sent_at >= _LOAD_HEARTBEAT_S:
                yield load
                sent, sent_at = load, now
            if load.draining:
                await asyncio.sleep(interval_s)
            else:
                await _wait_at_most(self.lifecycle.draining.wait(), interval_s)


async def _wait_at_most(event: Awaitable[bool], seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event
    except TimeoutError:
        pass


async def serve(
    role: "common_pb2.Role.ValueType",
    service_name: str,
    add_servicer: Callable[[Worker, aio.Server], Callable[[], Awaitable[None]]],
) -> None:
    """Runs a worker process from its environment until SIGTERM or SIGINT.

    Args:
        add_servicer: adds the role's servicer to the server; returns what closes it.
    """
    settings = WorkerSettings.load()
    name = service_name.rpartition(".")[2].lower()
    logs.configure(f"baton-{name}")
    telemetry = setup(f"baton-{name}", instance=settings.listen)
    try:
        engine = create_engine(engine_config(settings, role), settings.engine.value)
        await engine.start()
    except EngineError as error:
        raise SystemExit(f"cannot serve {settings.model}: {error}") from error
    server = RpcServer(
        settings.listen,
        (service_name,),
        (TracingServerInterceptor(telemetry.tracer),),
        settings.drain_s,
        Pings(settings.ping_s, settings.ping_timeout_s),
    )
    worker = Worker(settings, engine, telemetry, server.lifecycle, role)
    telemetry.metrics.watch_load(engine.load)
    close = add_servicer(worker, server.server)
    try:
        address = await server.start()
    except RuntimeError as error:
        raise SystemExit(f"BATON_LISTEN: {settings.listen} cannot be bound: {error}") from error
    log.info("serving", role=name, address=address, model=engine.info.identity.model)
    has_failed = await _run(server, engine)
    await close()
    await engine.close()
    telemetry.shutdown()
    if has_failed:
        raise SystemExit("the engine has failed")


async def _run(server: RpcServer, engine: Engine) -> bool:
    """Serves until a signal and the drain after it, or until the engine fails; True for the latter.

    A worker that cannot compute must not look alive: it ends, and whatever supervises it restarts it.
    """
    served = asyncio.create_task(server.run_until_signal())
    failed = asyncio.create_task(engine.failed())
    await asyncio.wait((served, failed), return_when=asyncio.FIRST_COMPLETED)
    has_failed = failed.done() and not served.done()
    for task in (served, failed):
        task.cancel()
    await asyncio.gather(served, failed, return_exceptions=True)
    if has_failed:
        await server.server.stop(grace=0.2)
    return has_failed


def engine_config(settings: WorkerSettings, role: "common_pb2.Role.ValueType") -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        model=settings.model,
        model_name=settings.model_name or settings.model.name,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory_mb * 1024 * 1024,
        max_num_seqs=settings.max_num_seqs,
        max_queue_len=settings.max_queue_len,
        max_batched_tokens=settings.max_batched_tokens,
        prefill_chunk=settings.prefill_chunk,
        max_model_len=settings.max_model_len or None,
        prefix_cache=settings.prefix_cache,
        share_kv=role == common_pb2.ROLE_PREFILL and settings.kv_transport is KvTransport.AUTO,
        threads=settings.threads,
        precision=settings.precision,
        device=settings.device,
        sim_prefill_ms_per_token=settings.sim_prefill_ms_per_token,
        sim_token_ms=settings.sim_token_ms,
        sim_jitter_ms=settings.sim_jitter_ms,
        sim_seed=settings.sim_seed,
    )
