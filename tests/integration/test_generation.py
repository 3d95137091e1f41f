"""Generations over real workers with simulated engines: handoff, failure midway, and the same text."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import common_pb2
from gateway.event_log_memory import MemoryEventLog
from gateway.events import EventKind
from gateway.generation import Generations
from gateway.owned_reply import OwnedReply
from gateway.replies import ReplyHub
from gateway.router import Router
from gateway.sampling import ReplySpec, Sampling
from gateway.tokenizer import ChatTokenizer
from observability.telemetry import build
from observability.timings import HANDOFF_STAGES, TTFT_STAGES
from services.decode.__main__ import add_servicer as add_decode
from services.engine.sim_model import write_sim_model
from services.prefill.__main__ import add_servicer as add_prefill
from services.rpc.interceptors import TracingClientInterceptor
from tests.integration.cluster import RunningWorker, running_worker
from tests.waiting import eventually


@asynccontextmanager
async def stack(
    folder: Path, num_decode: int = 2, **overrides: object
) -> AsyncIterator[tuple[Generations, Router, list[RunningWorker]]]:
    """One prefill worker, decode workers that cannot do without it, and a gateway's inside."""
    model = folder / "baton-sim"
    write_sim_model(model)
    telemetry = build("gateway", "test")
    async with AsyncExitStack() as exits:
        prefill = await exits.enter_async_context(
            running_worker(model, common_pb2.ROLE_PREFILL, add_prefill, "baton.v1.Prefill", **overrides)
        )
        decodes = [
            await exits.enter_async_context(
                running_worker(
                    model,
                    common_pb2.ROLE_DECODE,
                    add_decode,
                    "baton.v1.Decode",
                    local_prefill="never",
                    **overrides,
                )
            )
            for _ in range(num_decode)
        ]
        hub = ReplyHub(MemoryEventLog("g1"), gateway_id="g1", lease_s=3.0, resume_grace_s=30.0)
        router = Router(
            [worker.address for worker in decodes],
            [prefill.address],
            (TracingClientInterceptor(telemetry.tracer),),
        )
        generations = Generations(
            hub, router, ChatTokenizer(model), telemetry, admit_timeout_s=5, retry_s=5, max_replies=100
        )
        await hub.start()
        await router.start()
        workers = [prefill, *decodes]
        await eventually(lambda: all(router.heard_at(worker.address) is not None for worker in workers))
        try:
            yield generations, router, workers
        finally:
            await generations.close()
            await router.close()
            await hub.close()
            telemetry.shutdown()


def spec(router: Router, **changes: Any) -> ReplySpec:
    model = router.model
    assert model is not None
    fields: dict[str, Any] = {
        "model": model.name,
        "fingerprint": model.fingerprint,
        "prompt_token_ids": tuple((7 * i) % 200 for i in range(100)),
        "sampling": Sampling(max_tokens=60),
        "seed": 11,
        "timeout_s": 30.0,
    }
    return ReplySpec(**{**fields, **changes})


def text_of(reply: OwnedReply, choice: int = 0) -> str:
    deltas = [event.payload for event in reply.events if event.kind is EventKind.DELTA]
    return "".join(delta["text"] for delta in deltas if delta["choice"] == choice)


async def test_a_reply_goes_through_the_handoff_and_its_stages_add_up(tmp_path: Path) -> None:
    async with stack(tmp_path, sim_prefill_ms_per_token=1.0) as (generations, router, workers):
        reply = await generations.start(spec(router), arrived=time.monotonic())
        await eventually(lambda: reply.settled)
        timings = reply.events[-1].payload["timings"]
        assert timings["prefill"] > 80
        assert all(name in timings for name in HANDOFF_STAGES)
        assert sum(timings[name] for name in TTFT_STAGES) == pytest.approx(timings["ttft"], abs=0.1)
        assert timings["relay"] < 50
        assert len(text_of(reply)) > 60
        await eventually(lambda: sum(worker.blocks_used for worker in workers) == 0)


async def test_a_reply_whose_worker_dies_reads_as_if_nothing_had_happened(tmp_path: Path) -> None:
    async with stack(tmp_path, sim_token_ms=5.0) as (generations, router, workers):
        undisturbed = await generations.start(spec(router), arrived=time.monotonic())
        await eventually(lambda: undisturbed.settled)
        reply = await generations.start(spec(router), arrived=time.monotonic())
        await eventually(lambda: len(reply.events) > 20)
        (serving,) = [worker for worker in workers[1:] if worker.blocks_used]
        await serving.server.server.stop(None)
        await eventually(lambda: reply.settled)
        assert text_of(reply) == text_of(undisturbed)
        assert reply.events[-1].kind is EventKind.DONE
        await eventually(lambda: sum(worker.blocks_used for worker in workers) == 0)


async def test_a_drained_worker_ends_what_it_began_and_gets_nothing_new(tmp_path: Path) -> None:
    async with stack(tmp_path, sim_token_ms=5.0) as (generations, router, workers):
        reply = await generations.start(spec(router), arrived=time.monotonic())
        await eventually(lambda: len(reply.events) > 10)
        (serving,) = [worker for worker in workers[1:] if worker.blocks_used]
        drain = asyncio.create_task(serving.server.drain())
        await eventually(lambda: router.route((1,)).decode.address != serving.address)
        later = await generations.start(spec(router), arrived=time.monotonic())
        await eventually(lambda: reply.settled and later.settled)
        await drain
        assert text_of(reply) == text_of(later)


async def test_cancelling_frees_every_block(tmp_path: Path) -> None:
    async with stack(tmp_path, sim_token_ms=20.0) as (generations, router, workers):
        reply = await generations.start(spec(router, num_choices=2), arrived=time.monotonic())
        await eventually(lambda: len(reply.events) > 12)
        reply.request_stop("cancelled")
        await eventually(
            lambda: reply.settled and sum(worker.blocks_used for worker in workers) == 0, timeout=1.5
        )
