"""The hub on both logs: commits, readers, attendance, cancels."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from gateway.endings import cancelled_ending
from gateway.event_log import CursorConflict, InvalidReplyId, ReplyExists, ReplyUnknown
from gateway.events import EventKind, ReplyStatus
from gateway.owned_reply import ReplyClosed
from gateway.replies import ReplyHub
from tests.redis_server import RedisServer
from tests.unit.gateway.event_logs import home_of, new_meta
from tests.unit.gateway.hubs import (
    Hubs,
    ManualClock,
    finish,
    logged,
    opened,
    read_all,
    say,
    steered,
    text_of,
)
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def hubs(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Hubs]:
    async with home_of(request.param, server) as home, Hubs(home) as hubs:
        yield hubs


@pytest.fixture
async def hub(hubs: Hubs) -> ReplyHub:
    return await hubs.open("g1")


# committing


async def test_no_reader_sees_what_the_log_does_not_hold(hub: ReplyHub) -> None:
    log, reply = steered(hub), await opened(hub)
    log.gate.clear()
    reader = asyncio.create_task(read_all(hub, reply.meta.reply_id))
    say(reply, "a", "b")
    await eventually(lambda: log.num_waiting == 1 and reply.num_readers == 1)
    say(reply, "c")
    assert reply.events == []
    assert (await hub.state(reply.meta.reply_id)).last_seq == 0
    assert reply.first_delta_emitted_at is not None
    assert reply.first_delta_committed_at is None
    log.gate.set()
    await reply.flushed()
    assert text_of(await logged(hub, reply.meta)) == "abc"
    assert reply.first_delta_committed_at is not None
    finish(reply)
    assert text_of(await reader) == "abc"


async def test_every_event_read_is_in_the_log_at_that_moment(hub: ReplyHub) -> None:
    reply = await opened(hub)

    async def generate() -> None:
        for n in range(50):
            say(reply, f"{n} ")
            await asyncio.sleep(0)
        finish(reply)

    generating = asyncio.create_task(generate())
    async with aclosing(hub.read(reply.meta.reply_id, 0)) as pages:
        async for page in pages:
            assert (await hub.log.state(reply.meta.reply_id)).last_seq >= page[-1].seq
    await generating


async def test_what_gathers_during_a_commit_goes_in_one(hub: ReplyHub) -> None:
    log = steered(hub)
    replies = [await opened(hub) for _ in range(20)]
    log.gate.clear()
    say(replies[0], "first")
    await eventually(lambda: log.num_waiting == 1)
    for reply in replies:
        say(reply, "a", "b", "c")
        finish(reply)
    log.gate.set()
    for reply in replies:
        await reply.flushed()
    assert [len(batch) for batch in log.batches] == [1, 20]
    assert [len(await logged(hub, reply.meta)) for reply in replies] == [5] + [4] * 19


async def test_a_huge_backlog_is_committed_in_parts_and_in_order(hub: ReplyHub) -> None:
    reply, other = await opened(hub), await opened(hub)
    say(reply, *(f"{n} " for n in range(3000)))
    say(other, "x")
    finish(reply)
    await reply.flushed()
    await other.flushed()
    assert max(len(pending.events) for batch in steered(hub).batches for pending in batch) <= 1024
    events = await read_all(hub, reply.meta.reply_id)
    assert text_of(events) == "".join(f"{n} " for n in range(3000))


async def test_nothing_is_emitted_after_the_end(hub: ReplyHub) -> None:
    reply = await opened(hub)
    finish(reply)
    with pytest.raises(ReplyClosed):
        say(reply, "late")
    await reply.flushed()
    assert len(await logged(hub, reply.meta)) == 1
    await eventually(lambda: hub.owned(reply.meta.reply_id) is None)


async def test_closing_commits_what_is_pending(hubs: Hubs) -> None:
    hub, other = await hubs.open("g1"), await hubs.open("g2")
    reply = await opened(hub)
    say(reply, "a", "b")
    await hub.close()
    assert text_of(await logged(other, reply.meta)) == "ab"


async def test_only_good_and_fresh_ids_are_opened(hub: ReplyHub) -> None:
    reply = await opened(hub)
    with pytest.raises(ReplyExists):
        await hub.open(reply.meta, arrived=0.0)
    for down in (False, True):
        steered(hub).down = down
        with pytest.raises(InvalidReplyId):
            await hub.open(new_meta(reply_id="no id"), arrived=0.0)


# reading


async def test_resuming_at_every_cursor_at_the_owner_and_elsewhere(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    reply = await opened(owner)
    reply_id = reply.meta.reply_id
    say(reply, *"abcdef")
    await reply.flushed()
    live = [
        asyncio.create_task(read_all(hub, reply_id, cursor)) for hub in (owner, other) for cursor in range(7)
    ]
    say(reply, *"ghij")
    finish(reply)
    async with asyncio.timeout(5):
        assert [text_of(events) for events in await asyncio.gather(*live)] == [
            "abcdefghij"[cursor:] for _ in range(2) for cursor in range(7)
        ]
    await eventually(lambda: owner.owned(reply_id) is None)
    for hub in (owner, other):  # and after the end, again and again
        for cursor in range(12):
            assert text_of(await read_all(hub, reply_id, cursor, 1)) == "abcdefghij"[cursor:]


async def test_a_slow_reader_holds_up_nobody(hub: ReplyHub) -> None:
    reply = await opened(hub)
    say(reply, "a")
    async with aclosing(hub.read(reply.meta.reply_id, 0)) as slow:
        assert text_of(await anext(slow)) == "a"
        say(reply, *"bcd")
        finish(reply)
        assert text_of(await read_all(hub, reply.meta.reply_id)) == "abcd"
        assert hub.owned(reply.meta.reply_id) is reply  # kept for the slow one
        assert [text_of(page) async for page in slow] == ["bcd"]
    await eventually(lambda: hub.owned(reply.meta.reply_id) is None)


async def test_a_cursor_that_is_no_point_of_the_log_is_a_conflict(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    reply = await opened(owner)
    reply_id = reply.meta.reply_id
    say(reply, *"abc")
    await reply.flushed()
    for hub in (owner, other):
        with pytest.raises(CursorConflict):
            await read_all(hub, reply_id, 4)
        with pytest.raises(CursorConflict):
            await read_all(hub, reply_id, 2, after_epoch=2)
    finish(reply)
    await reply.flushed()
    for hub in (owner, other):
        for after_epoch in (None, 1):
            with pytest.raises(CursorConflict):
                await read_all(hub, reply_id, 9, after_epoch)
    with pytest.raises(ReplyUnknown):
        await read_all(other, new_meta().reply_id)


# attendance


async def test_a_reply_is_abandoned_after_the_grace_and_not_before(hubs: Hubs) -> None:
    clock = ManualClock()
    hub = await hubs.open("g1", clock=clock)
    never, left, kept = await opened(hub), await opened(hub), await opened(hub, on_disconnect="continue")
    async with hub.attach(left.meta.reply_id), hub.attach(left.meta.reply_id):
        clock.now += 29
        await hub.check_attendance()
        assert never.stop_reason is None
        clock.now += 2
        await hub.check_attendance()
        assert never.stop_reason == "abandoned"
    await eventually(lambda: is_unattended(hub, left.meta.reply_id))
    await hub.check_attendance()
    clock.now += 29
    await hub.check_attendance()
    assert left.stop_reason is None
    async with hub.attach(left.meta.reply_id):  # back in time: the grace starts anew
        await hub.check_attendance()
    await eventually(lambda: is_unattended(hub, left.meta.reply_id))
    clock.now += 29
    await hub.check_attendance()
    assert left.stop_reason is None
    clock.now += 2
    await hub.check_attendance()
    assert left.stop_reason == "abandoned"
    assert kept.stop_reason is None


async def is_unattended(hub: ReplyHub, reply_id: str) -> bool:
    return not await hub.log.is_attached(reply_id)


async def test_a_client_at_another_gateway_keeps_a_reply_alive(hubs: Hubs) -> None:
    clock = ManualClock()
    owner, other = await hubs.open("g1", clock=clock, lease_s=30), await hubs.open("g2", lease_s=30)
    reply = await opened(owner)
    async with other.attach(reply.meta.reply_id):
        for _ in range(5):
            clock.now += 31
            await owner.check_attendance()
            assert reply.stop_reason is None
    await eventually(lambda: is_unattended(owner, reply.meta.reply_id))
    await owner.check_attendance()
    clock.now += 31
    await owner.check_attendance()
    assert reply.stop_reason == "abandoned"


@pytest.mark.parametrize("hub_knows", [True, False])
async def test_nobody_is_abandoned_while_the_log_cannot_be_asked(hubs: Hubs, *, hub_knows: bool) -> None:
    clock = ManualClock()
    hub = await hubs.open("g1", clock=clock)
    reply, noticed = await opened(hub), await opened(hub)
    steered(hub).down = True
    if hub_knows:
        say(noticed, "a")
        await eventually(lambda: hub.degraded)
    clock.now += 100
    await hub.check_attendance()
    assert reply.stop_reason is None
    steered(hub).down = False
    await eventually(lambda: not hub.degraded)
    await hub.check_attendance()  # marks may have lapsed meanwhile: the grace starts here
    clock.now += 29
    await hub.check_attendance()
    assert reply.stop_reason is None


async def test_on_disconnect_cancel_stops_when_the_last_client_leaves(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    reply, later = await opened(owner, on_disconnect="cancel"), await opened(owner, on_disconnect="cancel")
    reply_id = reply.meta.reply_id
    async with other.attach(reply_id):
        async with owner.attach(reply_id):
            pass
        async with owner.attach(later.meta.reply_id):
            pass
        await eventually(lambda: later.stop_reason == "abandoned")
        assert reply.stop_reason is None
    await eventually(lambda: is_unattended(owner, reply_id))
    async with owner.attach(reply_id):
        pass
    await eventually(lambda: reply.stop_reason == "abandoned")


async def test_a_cancelled_connection_takes_its_mark_back(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    reply = await opened(owner)

    async def connection() -> None:
        async with other.attach(reply.meta.reply_id):
            await asyncio.Event().wait()

    for turns in range(20):
        connected = asyncio.create_task(connection())
        for _ in range(turns):
            await asyncio.sleep(0)
        connected.cancel()
        await asyncio.wait([connected])
        assert connected.cancelled()
        await eventually(lambda: is_unattended(owner, reply.meta.reply_id), timeout=1)


# cancelling


async def test_a_cancel_stops_the_owner_from_anywhere(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    near, far = await opened(owner), await opened(owner)
    await owner.cancel(near.meta.reply_id)
    assert near.stop_reason == "cancelled"
    await other.cancel(far.meta.reply_id)
    await other.cancel(far.meta.reply_id)
    await eventually(lambda: far.stop_reason == "cancelled", timeout=1)
    for reply in (near, far):
        assert (await other.state(reply.meta.reply_id)).cancel_requested
        for kind, payload in cancelled_ending(reply.meta, reply.events):
            reply.emit(kind, payload)
        await reply.flushed()
        assert (await other.state(reply.meta.reply_id)).status is ReplyStatus.CANCELLED
        await other.cancel(reply.meta.reply_id)  # nothing for a finished one
    with pytest.raises(ReplyUnknown):
        await other.cancel(new_meta().reply_id)


async def test_a_cancelled_reply_whose_owner_is_dead_is_ended_by_the_receiver(hubs: Hubs) -> None:
    dead, other = await hubs.open("g1", lease_s=0.2), await hubs.open("g2", lease_s=0.2)
    reply = await opened(dead)
    reply.emit(EventKind.CREATED, {"created": 1, "model": "m", "num_prompt_tokens": 3, "num_choices": 1})
    reply.emit(EventKind.ITEM_START, {"choice": 0})
    reply.emit(EventKind.PART_START, {"choice": 0})
    say(reply, "a", "b")
    await dead.close()
    reader = asyncio.create_task(read_all(other, reply.meta.reply_id))
    await other.cancel(reply.meta.reply_id)
    async with asyncio.timeout(3):
        events = await reader
    kinds = ["text_done", "part_done", "item_done", "finish", "usage", "done"]
    assert [event.kind for event in events[5:]] == kinds
    assert [event.epoch for event in events] == [1] * 5 + [2] * 6
    assert (await other.state(reply.meta.reply_id)).status is ReplyStatus.CANCELLED
