"""The hub on both logs when owners change, the log is down, full or empty again."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from gateway.event_log import CursorConflict, LogUnavailable, ReplyGone, ReplyUnknown
from gateway.events import Event, ReplyStatus
from gateway.owned_reply import OwnedReply, ReplyClosed
from gateway.replies import ReplyHub
from tests.redis_server import RedisServer
from tests.unit.gateway.event_logs import RedisHome, append, delta, home_of, new_meta
from tests.unit.gateway.hubs import Hubs, finish, logged, opened, read_all, say, steered, text_of
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def hubs(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Hubs]:
    async with home_of(request.param, server) as home, Hubs(home) as hubs:
        yield hubs


# taking over


async def test_a_living_owner_is_not_taken_over(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1", lease_s=0.3), await hubs.open("g2", lease_s=0.3)
    reply = await opened(owner)
    assert await other.take_over(reply.meta.reply_id) is None
    finish(reply)
    await reply.flushed()
    assert await other.take_over(reply.meta.reply_id) is None
    with pytest.raises(ReplyUnknown):
        await other.take_over(new_meta().reply_id)


async def test_of_many_heirs_one_wins_and_the_fenced_owner_appends_nothing(hubs: Hubs) -> None:
    owner = await hubs.open("g1", lease_s=60)  # renews so seldom that the others take it for dead
    heirs = [await hubs.open(f"g{n}", lease_s=0.2) for n in range(2, 6)]
    reply = await opened(owner, seed=7)
    reply_id = reply.meta.reply_id
    say(reply, "a", "b")
    await reply.flushed()
    readers = [asyncio.create_task(read_all(hub, reply_id)) for hub in (owner, heirs[0], heirs[1])]
    taken = await asyncio.gather(*(heir.take_over(reply_id) for heir in heirs))
    (adopted,) = [heir_reply for heir_reply in taken if heir_reply is not None]
    assert (adopted.epoch, adopted.meta.seed, text_of(adopted.events)) == (2, 7, "ab")
    say(reply, "x")
    with pytest.raises(ReplyClosed):
        await reply.flushed()
    assert reply.stop_reason == "fenced"
    with pytest.raises(ReplyClosed):
        say(reply, "y")
    say(adopted, "c")
    finish(adopted)
    async with asyncio.timeout(5):
        assert [text_of(events) for events in await asyncio.gather(*readers)] == ["abc"] * 3
    assert [event.epoch for event in await logged(heirs[0], reply.meta)] == [1, 1, 2, 2]
    assert owner.owned(reply_id) is None


async def test_a_reader_of_a_cut_off_owner_is_told_where_histories_part(hubs: Hubs) -> None:
    owner, heir = await hubs.open("g1", lease_s=0.2), await hubs.open("g2", lease_s=0.2)
    reply = await opened(owner)
    say(reply, "a")
    await reply.flushed()
    reader = asyncio.create_task(read_all(owner, reply.meta.reply_id))
    steered(owner).down = True  # cut off from the store, but alive
    say(reply, "x")
    await eventually(lambda: len(reply.events) == 2)
    adopted = await heir.take_over(reply.meta.reply_id)
    assert adopted is not None
    say(adopted, "b", "c")
    finish(adopted)
    steered(owner).down = False
    async with asyncio.timeout(3):
        with pytest.raises(CursorConflict):
            await reader
        with pytest.raises(CursorConflict):
            await read_all(owner, reply.meta.reply_id, 2, after_epoch=1)
        assert text_of(await read_all(owner, reply.meta.reply_id, 1)) == "bc"
    assert reply.fenced


async def test_an_owner_that_only_idles_learns_of_its_fence_by_its_lease(hubs: Hubs) -> None:
    owner, heir = await hubs.open("g1", lease_s=0.3), await hubs.open("g2")
    reply = await opened(owner)
    token = (await heir.log.state(reply.meta.reply_id)).lease_token
    adopted = await heir.adopt(reply.meta.reply_id, token)
    if adopted is None:  # the owner renewed in between
        return
    await asyncio.wait_for(reply.stop.wait(), 2)
    assert reply.fenced
    await eventually(lambda: owner.owned(reply.meta.reply_id) is None)


async def test_an_heir_hears_of_a_cancel_that_the_dead_owner_was_asked_for(hubs: Hubs) -> None:
    owner, heir = await hubs.open("g1", lease_s=0.2), await hubs.open("g2", lease_s=0.2)
    reply = await opened(owner)
    await owner.close()
    await heir.log.request_cancel(reply.meta.reply_id)
    adopted = await heir.take_over(reply.meta.reply_id)
    assert adopted is not None
    await eventually(lambda: adopted.stop_reason == "cancelled", timeout=2)


# the log is down


async def test_live_replies_go_on_unlogged_and_are_whole_in_the_log_afterwards(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    reply = await opened(owner)
    reply_id = reply.meta.reply_id
    say(reply, "a")
    await reply.flushed()
    steered(owner).down = True
    async with aclosing(owner.read(reply_id, 0)) as live:
        assert [event.logged for event in await anext(live)] == [True]
        say(reply, "b", "c")
        async with asyncio.timeout(2):
            page = await anext(live)
        assert (text_of(page), [event.logged for event in page]) == ("bc", [False, False])
        assert owner.degraded
        assert text_of(await logged(other, reply.meta)) == "a"
        assert (await owner.state(reply_id)).last_seq == 3
        assert await owner.meta(reply_id) == reply.meta
        steered(owner).down = False
        await eventually(lambda: not owner.degraded and reply.num_logged == 3)
        assert [event.logged for event in reply.events] == [True] * 3
        say(reply, "d")
        finish(reply)
        assert text_of([event for page in [page async for page in live] for event in page]) == "d"
    assert text_of(await logged(other, reply.meta)) == "abcd"
    assert text_of(await read_all(other, reply_id, 2, after_epoch=1)) == "cd"
    with pytest.raises(CursorConflict):
        await read_all(other, reply_id, 2, after_epoch=2)


async def test_a_reply_opened_while_the_log_is_down_is_logged_later(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    steered(owner).down = True
    reply, silent = await opened(owner), await opened(owner)
    assert (reply.resumable, owner.degraded) == (False, True)
    say(reply, "a", "b")
    async with asyncio.timeout(2):
        await reply.flushed()
    assert reply.first_delta_committed_at is not None
    with pytest.raises(LogUnavailable):
        await read_all(owner, new_meta().reply_id)
    steered(owner).down = False
    await eventually(lambda: reply.num_logged == 2)
    assert text_of(await logged(other, reply.meta)) == "ab"
    finish(reply)
    finish(silent)
    await eventually(lambda: owner.owned(silent.meta.reply_id) is owner.owned(reply.meta.reply_id) is None)
    assert (await other.state(silent.meta.reply_id)).status is ReplyStatus.DONE


async def test_a_follower_elsewhere_waits_out_a_short_outage(hubs: Hubs) -> None:
    owner = await hubs.open("g1")
    patient, hasty = await hubs.open("g2"), await hubs.open("g3", outage_patience_s=0.0)
    reply = await opened(owner)
    say(reply, "a")
    await reply.flushed()
    pages = [hub.read(reply.meta.reply_id, 0) for hub in (patient, hasty)]
    for reading in pages:
        assert text_of(await anext(reading)) == "a"
    for hub in (patient, hasty):
        steered(hub).down = True
        with pytest.raises(LogUnavailable):
            await read_all(hub, reply.meta.reply_id)
    rest = asyncio.create_task(anext(pages[0]))
    say(reply, "b")
    await reply.flushed()
    with pytest.raises(LogUnavailable):
        await anext(pages[1])
    steered(patient).down = False
    async with asyncio.timeout(3):
        assert text_of(await rest) == "b"
    await pages[0].aclose()


async def test_what_is_unlogged_is_bounded(hubs: Hubs) -> None:
    owner = await hubs.open("g1", max_unlogged_events=10)
    reply, quiet = await opened(owner), await opened(owner)
    steered(owner).down = True
    say(reply, *"0123456789")
    await reply.flushed()
    assert reply.stop_reason is None
    say(reply, "x")
    await eventually(lambda: reply.stop_reason == "overflow")
    assert quiet.stop_reason is None
    finish(reply)  # the generation's ending is still taken
    await reply.flushed()
    steered(owner).down = False
    await eventually(lambda: reply.settled)


async def test_the_bound_is_for_one_outage(hubs: Hubs) -> None:
    owner = await hubs.open("g1", max_unlogged_events=10)
    reply = await opened(owner)
    for num_events in (8, 16, 24):
        steered(owner).down = True
        say(reply, *"01234567")
        await reply.flushed()
        steered(owner).down = False
        await eventually(lambda goal=num_events: reply.num_logged == goal)  # type: ignore[misc]
    assert reply.stop_reason is None


async def test_a_store_that_takes_no_writes_is_asked_seldom_and_the_bound_holds(hubs: Hubs) -> None:
    owner = await hubs.open("g1", max_unlogged_events=3, lease_s=0.4)  # probes every 0.1 s
    reply = await opened(owner)
    log = steered(owner)
    log.refusing = True
    started = time.monotonic()
    say(reply, "a")
    await eventually(lambda: len(log.batches) >= 4)
    assert time.monotonic() - started >= 0.25
    say(reply, "b", "c", "d")
    await eventually(lambda: reply.stop_reason == "overflow", timeout=2)
    log.refusing = False
    await eventually(lambda: reply.num_logged == 4)


async def test_closing_while_the_log_is_down_does_not_hang(hubs: Hubs) -> None:
    hub = await hubs.open("g1")
    reply = await opened(hub)
    steered(hub).down = True
    say(reply, "a")
    async with asyncio.timeout(3):
        await hub.close()


# the store has lost its data


async def test_lost_data_is_restored_under_a_live_reply_and_its_followers(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    reply = await opened(owner)
    say(reply, "a", "b")
    await reply.flushed()
    async with aclosing(other.read(reply.meta.reply_id, 0)) as following:
        assert text_of(await anext(following)) == "ab"
        hubs.lose_data()
        say(reply, "c")
        finish(reply)
        await reply.flushed()
        async with asyncio.timeout(3):
            assert text_of([event async for page in following for event in page]) == "c"
    assert text_of(await logged(other, reply.meta)) == "abc"
    assert not reply.fenced


async def test_an_idle_reply_is_restored_by_its_lease(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1", lease_s=0.3), await hubs.open("g2")
    spoken, silent = await opened(owner), await opened(owner)
    say(spoken, "a")
    await spoken.flushed()
    hubs.lose_data()

    async def is_back() -> bool:
        try:
            return bool(await logged(other, spoken.meta)) and not await logged(other, silent.meta)
        except ReplyUnknown:
            return False

    await eventually(is_back, timeout=3)
    assert spoken.stop_reason is silent.stop_reason is None


async def test_an_answer_from_before_the_loss_publishes_nothing(hubs: Hubs) -> None:
    owner = await hubs.open("g1", lease_s=60)
    log, reply = steered(owner), await opened(owner)
    say(reply, *"abc")
    await reply.flushed()
    log.answers.clear()
    say(reply, *"defghij")
    await eventually(lambda: _has_logged(owner, reply, 10))
    hubs.lose_data()
    await owner.renew()  # finds out, and makes the log anew
    log.gate.clear()
    log.answers.set()
    await eventually(lambda: log.num_waiting == 1)
    assert (len(reply.events), reply.num_logged) == (3, 0)
    log.gate.set()
    await reply.flushed()
    assert text_of(await logged(owner, reply.meta)) == text_of(reply.events) == "abcdefghij"


async def _has_logged(hub: ReplyHub, reply: OwnedReply, num_events: int) -> bool:
    return len(await logged(hub, reply.meta)) == num_events


async def test_losing_data_again_and_again_amid_commits_and_renewals_fences_nobody(hubs: Hubs) -> None:
    owner, other = await hubs.open("g1", lease_s=30), await hubs.open("g2")
    replies = [await opened(owner) for _ in range(5)]
    for turn in range(12):
        for reply in replies:
            say(reply, f"{turn} ")
        if turn % 3 == 1:
            hubs.lose_data()
        await asyncio.gather(owner.renew(), owner.renew(), *(reply.flushed() for reply in replies))
    for reply in replies:
        finish(reply)
    await eventually(lambda: all(reply.settled for reply in replies))
    whole = "".join(f"{turn} " for turn in range(12))
    hubs_agree = [text_of(await logged(other, reply.meta)) for reply in replies]
    assert hubs_agree == [whole] * 5
    assert [reply.stop_reason for reply in replies] == [None] * 5


async def test_another_history_is_never_spliced_onto_what_a_reader_has(hubs: Hubs) -> None:
    """The store and the owner die together; somebody else begins the reply anew, as a higher epoch."""
    owner, other = await hubs.open("g1"), await hubs.open("g2")
    reply = await opened(owner)
    say(reply, "a", "b")
    await reply.flushed()
    async with aclosing(other.read(reply.meta.reply_id, 0)) as following:
        assert text_of(await anext(following)) == "ab"
        await owner.close()
        hubs.lose_data()
        assert await other.log.restore(reply.meta, 2)
        await append(other.log, reply.meta.reply_id, *(delta(n, 2, text="z") for n in (1, 2, 3)), epoch=2)
        with pytest.raises(CursorConflict):
            await anext(following)


async def test_a_hub_survives_the_real_thing(server: RedisServer) -> None:
    """Redis is stalled, killed and started empty under generating replies; no text is lost or doubled."""
    async with RedisHome(server) as home, Hubs(home) as hubs:
        owner, other = await hubs.open("g1", lease_s=0.6), await hubs.open("g2", lease_s=0.6)
        replies = [await opened(owner) for _ in range(10)]
        stop = asyncio.Event()
        readers = [asyncio.create_task(read_all(owner, reply.meta.reply_id)) for reply in replies]
        followers = [asyncio.create_task(_followed(other, reply)) for reply in replies]

        async def generate() -> int:
            n = 0
            while not stop.is_set():
                for reply in replies:
                    say(reply, f"{n} ")
                n += 1
                await asyncio.sleep(0.005)
            for reply in replies:
                finish(reply)
            return n

        generating = asyncio.create_task(generate())
        await eventually(lambda: replies[0].num_logged > 5)
        server.pause()
        await eventually(lambda: owner.degraded)
        server.resume()
        await eventually(lambda: not owner.degraded)
        server.kill()
        await eventually(lambda: owner.degraded)
        server.start()
        await eventually(lambda: not owner.degraded)
        stop.set()
        whole = "".join(f"{n} " for n in range(await generating))
        async with asyncio.timeout(10):
            assert [text_of(events) for events in await asyncio.gather(*readers)] == [whole] * 10
            assert [text_of(events) for events in await asyncio.gather(*followers)] == [whole] * 10
        assert [reply.stop_reason for reply in replies] == [None] * 10


async def _followed(hub: ReplyHub, reply: OwnedReply) -> list[Event]:
    """As a client does: attached, and resuming where it was when the log answers again."""
    events: list[Event] = []
    while True:
        try:
            async with hub.attach(reply.meta.reply_id):
                after = len(events)
                epoch = events[-1].epoch if events else None
                async with aclosing(hub.read(reply.meta.reply_id, after, epoch)) as pages:
                    async for page in pages:
                        events += page
                return events
        except (LogUnavailable, ReplyUnknown, ReplyGone):
            await asyncio.sleep(0.02)
