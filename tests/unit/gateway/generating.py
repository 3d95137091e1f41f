"""What a gateway has under its HTTP surface, over scripted workers: the ground of the generation tests."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.event_log_memory import MemoryEventLog
from gateway.events import EventKind
from gateway.generation import Generations
from gateway.owned_reply import OwnedReply
from gateway.replies import ReplyHub
from gateway.router import Router
from gateway.routing.discovery import Resolve, resolve
from gateway.sampling import ReplySpec, Sampling
from observability.telemetry import build
from services.rpc.interceptors import TracingClientInterceptor
from tests.fake_decode import FINGERPRINT, FakeWorker, Script, running
from tests.waiting import eventually

NUM_TOKENS = 12
SPEC = ReplySpec(
    model="fake",
    fingerprint=FINGERPRINT,
    prompt_token_ids=tuple(range(20)),
    sampling=Sampling(max_tokens=NUM_TOKENS),
    timeout_s=20.0,
)


class FakeTokenizer:
    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"


@dataclass(slots=True)
class Gateway:
    """What a gateway has under its HTTP surface."""

    hub: ReplyHub
    router: Router
    generations: Generations
    spans: InMemorySpanExporter
    metrics: Any

    async def start(self, spec: ReplySpec = SPEC) -> OwnedReply:
        return await self.generations.start(spec, arrived=time.monotonic())

    async def finished(self, spec: ReplySpec = SPEC) -> OwnedReply:
        reply = await self.start(spec)
        await eventually(lambda: reply.settled)
        return reply


@asynccontextmanager
async def gateway(
    *workers: FakeWorker,
    prefill: Sequence[FakeWorker] = (),
    retry_s: float = 2.0,
    admit_timeout_s: float = 5.0,
    max_replies: int = 100,
    resume_grace_s: float = 30.0,
    log: MemoryEventLog | None = None,
    entries: Sequence[str] | None = None,
    resolve: Resolve = resolve,
    router_clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Gateway]:
    """A gateway that sees all the workers, which it starts; or those that `entries` stand for."""
    spans = InMemorySpanExporter()
    telemetry = build("gateway", "test", span_exporter=spans)
    async with running(*workers, *prefill):
        hub = ReplyHub(
            log or MemoryEventLog("g1"), gateway_id="g1", lease_s=3.0, resume_grace_s=resume_grace_s
        )
        router = Router(
            [w.address for w in workers] if entries is None else entries,
            [w.address for w in prefill],
            (TracingClientInterceptor(telemetry.tracer),),
            resolve=resolve,
            discovery_s=0.02,
            clock=router_clock,
            affinity=None,  # so that tests can tell by the load who is asked first
        )
        generations = Generations(
            hub,
            router,
            FakeTokenizer(),  # type: ignore[arg-type]
            telemetry,
            admit_timeout_s=admit_timeout_s,
            retry_s=retry_s,
            max_replies=max_replies,
            random=Random(1),
        )
        await hub.start()
        await router.start()
        if entries is None:
            await eventually(
                lambda: all(router.heard_at(w.address) is not None for w in (*workers, *prefill))
            )
        try:
            yield Gateway(hub, router, generations, spans, telemetry.metrics)
        finally:
            await generations.close()
            assert router.num_under_way == 0  # whatever a test did, every route has told its outcome
            await router.close()
            await hub.close()
            telemetry.shutdown()


def kinds(reply: OwnedReply) -> list[EventKind]:
    return [event.kind for event in reply.events]


def payloads(reply: OwnedReply, kind: EventKind) -> list[dict[str, Any]]:
    return [event.payload for event in reply.events if event.kind is kind]


def text_of(reply: OwnedReply, choice: int = 0) -> str:
    return "".join(p["text"] for p in payloads(reply, EventKind.DELTA) if p["choice"] == choice)


def error_of(reply: OwnedReply) -> dict[str, Any]:
    assert sum(event.is_terminal for event in reply.events) == 1
    assert reply.events[-1].kind is EventKind.ERROR
    return reply.events[-1].payload


def refusing(code: grpc.StatusCode, field: str = "") -> FakeWorker:
    return FakeWorker(script=Script(refuse=(code, f"{field}: as scripted", field)))
