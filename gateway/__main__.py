"""Starts a gateway: `python -m gateway`, configured by `BATON_*` variables."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import uvloop
from starlette.applications import Starlette

from gateway.app import create_app
from gateway.auth import ApiKeys
from gateway.context import Gateway
from gateway.event_log import EventLog
from gateway.event_log_memory import MemoryEventLog
from gateway.event_log_redis import RedisEventLog
from gateway.generation import Generations
from gateway.replies import ReplyHub
from gateway.router import Router
from gateway.server import make_server
from gateway.settings import GatewaySettings
from gateway.tokenizer import ChatTokenizer
from observability import logs
from observability.telemetry import setup
from services.rpc.channel import Pings
from services.rpc.interceptors import tracing_client_interceptors

log = structlog.get_logger()


def build(settings: GatewaySettings, api_keys: ApiKeys, tokenizer: ChatTokenizer) -> Gateway:
    """Everything of one gateway, not yet started; in the loop that it will run in."""
    telemetry = setup("baton-gateway", instance=settings.listen)
    gateway_id = f"{settings.listen}/{secrets.token_hex(8)}"  # of this process, not of the address
    hub = ReplyHub(
        _event_log(settings, gateway_id),
        gateway_id=gateway_id,
        lease_s=settings.lease_s,
        resume_grace_s=settings.resume_grace_s,
        on_append=telemetry.metrics.observe_append,
    )
    router = Router(
        settings.decode_workers,
        settings.prefill_workers,
        tracing_client_interceptors(telemetry.tracer),
        affinity=settings.affinity,
        discovery_s=settings.discovery_s,
        on_pick=telemetry.metrics.pick,
        pings=Pings(settings.ping_s, settings.ping_timeout_s),
    )
    telemetry.metrics.watch_workers(lambda: router.worker_states)
    generations = Generations(
        hub,
        router,
        tokenizer,
        telemetry,
        admit_timeout_s=settings.admit_timeout_s,
        retry_s=settings.retry_s,
        max_replies=settings.max_replies,
    )
    gateway = Gateway(settings, hub, router, generations, tokenizer, api_keys, telemetry)
    telemetry.metrics.watch_streams(lambda: sum(gateway.open_streams.values()))
    return gateway


def _event_log(settings: GatewaySettings, gateway_id: str) -> EventLog:
    lease_s, reply_ttl_s = settings.lease_s, settings.reply_ttl_s
    if settings.redis_url:
        return RedisEventLog(settings.redis_url, gateway_id, lease_s=lease_s, reply_ttl_s=reply_ttl_s)
    log.warning("no BATON_REDIS_URL: replies live in this process's memory and can be resumed only here")
    return MemoryEventLog(gateway_id, lease_s=lease_s, reply_ttl_s=reply_ttl_s)


@asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[None]:
    """Starts the parts in order; ends them in reverse, so that endings still find their log.

    Replies that nobody reads at the moment get what is left of the drain to end by themselves.
    """
    await gateway.hub.start()
    await gateway.router.start()
    try:
        yield
    finally:
        left_s = gateway.settings.drain_s
        if gateway.draining_since is not None:
            left_s -= time.monotonic() - gateway.draining_since
        await gateway.generations.idle(timeout_s=max(0.0, left_s))
        await gateway.generations.close()
        await gateway.hub.close()
        await gateway.hub.log.close()
        await gateway.router.close()
        gateway.telemetry.shutdown()


async def serve(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT and the drain after it."""
    try:
        api_keys = ApiKeys.from_file(settings.api_keys_file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"BATON_API_KEYS_FILE: {error}") from error
    try:
        tokenizer = ChatTokenizer(settings.model)
    except (OSError, ValueError) as error:
        raise SystemExit(f"BATON_MODEL: {error}") from error
    gateway = build(settings, api_keys, tokenizer)

    def drain() -> None:
        if gateway.draining_since is None:
            gateway.draining_since = time.monotonic()
            log.info("draining", streams=sum(gateway.open_streams.values()), deadline_s=settings.drain_s)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with running(gateway):
            log.info("serving", address=settings.listen, log="redis" if settings.redis_url else "memory")
            yield

    server = make_server(
        create_app(gateway, lifespan),
        settings.listen,
        drain_s=settings.drain_s,
        stalled_client_s=settings.slow_client_s,
        on_drain=drain,
    )
    await server.serve()


if __name__ == "__main__":
    logs.configure("baton-gateway")
    # uvloop also sets TCP_NODELAY on every accepted socket, which uvicorn's own loop leaves off.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(GatewaySettings.load()))
