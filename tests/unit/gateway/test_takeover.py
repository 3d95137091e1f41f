"""Going on with another gateway's reply: from every place where its log may have stopped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.event_log import PendingAppend
from gateway.event_log_memory import MemoryEventLog, MemoryStore
from gateway.events import Event, EventKind, ReplyStatus
from gateway.owned_reply import OwnedReply
from gateway.sampling import ReplySpec, Sampling
from tests.fake_decode import FakeWorker, Script
from tests.unit.gateway.event_logs import new_meta
from tests.unit.gateway.generating import SPEC, Gateway, error_of, gateway, text_of
from tests.waiting import eventually

RICH = replace(
    SPEC,
    num_choices=2,
    sampling=Sampling(max_tokens=5, logit_bias={7: 1.5}, stop=("x",), stop_token_ids=(3,), logprobs=1),
    priority=2,
    format_options={"include_usage": True},
)


def content(events: list[Event]) -> list[tuple[EventKind, dict[str, Any]]]:
    """Events without what depends on clocks."""
    timed = {"at_ms", "timings"}
    return [(e.kind, {k: v for k, v in e.payload.items() if k not in timed}) for e in events]


@asynccontextmanager
async def heir(worker: FakeWorker) -> AsyncIterator[tuple[Gateway, MemoryEventLog]]:
    """A gateway, and the log of another one that shares its store."""
    store = MemoryStore()
    async with gateway(worker, log=MemoryEventLog("g1", store=store)) as gw:
        yield gw, MemoryEventLog("dead", store=store)


async def inherit(gw: Gateway, owner: MemoryEventLog, reply: OwnedReply, num_events: int) -> OwnedReply:
    """The reply as the heir gets it when its owner got no further than `num_events`."""
    meta = replace(reply.meta, reply_id=f"{num_events:032d}")
    epoch = await owner.create(meta)
    if num_events:
        events = tuple(reply.events[:num_events])
        await owner.append([PendingAppend(meta.reply_id, epoch, events, ReplyStatus.RUNNING)])
    token = (await owner.state(meta.reply_id)).lease_token
    adopted = await gw.hub.adopt(meta.reply_id, token)
    assert adopted is not None
    return adopted


def test_a_spec_survives_its_journey_through_the_meta() -> None:
    meta = new_meta(
        model=RICH.model,
        fingerprint=RICH.fingerprint,
        prompt_token_ids=RICH.prompt_token_ids,
        request=RICH.as_dict(),
        format="chat",
        format_options=RICH.format_options,
        seed=9,
    )
    assert ReplySpec.from_meta(meta) == replace(RICH, seed=9)


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, num_choices=2)], ids=["one", "two"])
async def test_from_every_cut_the_log_becomes_what_it_would_have_been(spec: ReplySpec) -> None:
    async with heir(FakeWorker(script=Script(end_tokens=1))) as (gw, owner):
        whole = await gw.finished(spec)
        for cut in range(len(whole.events)):
            reply = await inherit(gw, owner, whole, cut)
            gw.generations.go_on(reply)
            await eventually(lambda reply=reply: reply.settled)
            assert content(reply.events[:cut]) == content(whole.events[:cut])
            # Two choices take turns as they come; each by itself is the same.
            assert sorted(map(repr, content(reply.events))) == sorted(map(repr, content(whole.events))), cut
            assert {event.epoch for event in reply.events[cut:]} == {2}
            stamps = [event.payload["at_ms"] for event in reply.events if "at_ms" in event.payload]
            assert stamps == sorted(stamps), "the events' stamps go back"


async def test_a_first_text_of_another_process_is_not_timed_here() -> None:
    async with heir(FakeWorker()) as (gw, owner):
        whole = await gw.finished()
        reply = await inherit(gw, owner, whole, 8)
        gw.generations.go_on(reply)
        await eventually(lambda: reply.settled)
        assert "ttft" in whole.events[-1].payload["timings"]
        assert "ttft" not in reply.events[-1].payload["timings"]


async def test_a_model_that_is_gone_ends_the_reply_with_a_typed_error() -> None:
    async with heir(FakeWorker()) as (gw, owner):
        whole = await gw.finished()
        whole.meta = replace(whole.meta, fingerprint="another")
        reply = await inherit(gw, owner, whole, 7)
        gw.generations.go_on(reply)
        await eventually(lambda: reply.settled)
        assert error_of(reply)["code"] == "model_replaced"
        assert text_of(reply) == text_of(whole)[: len(text_of(reply))]


class DurableLog(MemoryEventLog):
    """A log that outlives its gateway, as far as the gateway can tell."""

    @property
    def is_durable(self) -> bool:
        return True


async def test_a_gateway_that_stops_leaves_its_replies_to_others_and_counts_none() -> None:
    worker = FakeWorker(script=Script(token_delay_s=0.05))
    async with gateway(worker, log=DurableLog("g1")) as gw:
        reply = await gw.start()
        await eventually(lambda: len(reply.events) > 6)
        await gw.generations.close()
        await eventually(lambda: worker.num_running == 0)
        assert not reply.ended
        assert b"gen_ai_server_request_duration_seconds_count{" not in gw.metrics.render()[0]
