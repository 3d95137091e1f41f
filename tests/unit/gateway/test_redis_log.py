"""What only Redis can do to the log: lose data, stall, die, refuse writes, hold odd keys."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing

import pytest

from gateway import event_log_lua as lua
from gateway.event_log import AppendResult, EventLog, LogUnavailable, ReplyExists, ReplyUnknown
from gateway.event_log_redis import RedisEventLog
from gateway.events import Event
from tests.redis_server import RedisServer
from tests.unit.gateway.event_logs import (
    APPENDED,
    DUPLICATE,
    GAP,
    RedisHome,
    append,
    delta,
    deltas,
    done,
    new_meta,
    outcomes,
    pending,
)
from tests.waiting import eventually

DEADLINE_S = 3.5  # a call waits at most for the pool, the connection and the answer, a second each


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    shared_server.restart()
    return shared_server


@pytest.fixture
async def home(server: RedisServer) -> AsyncIterator[RedisHome]:
    async with RedisHome(server) as home:
        yield home


@pytest.fixture
async def log(home: RedisHome) -> EventLog:
    return await home.open("g1")


async def created(log: EventLog, *events: Event) -> str:
    meta = new_meta()
    await log.create(meta)
    if events:
        await append(log, meta.reply_id, *events)
    return meta.reply_id


async def collected(log: EventLog, reply_id: str, after: int = 0) -> list[Event]:
    async with aclosing(log.follow(reply_id, after)) as pages:
        return [event async for page in pages for event in page]


def num_connections(server: RedisServer) -> int:
    with server.client() as client:
        return len(client.client_list()) - 1


# losing data


async def test_lost_events_are_noticed_by_writer_readers_and_claimers(
    log: EventLog, server: RedisServer
) -> None:
    meta = new_meta()
    await log.create(meta)
    await append(log, meta.reply_id, *deltas(1, 3))
    token = (await log.state(meta.reply_id)).lease_token
    with server.client() as client:
        client.delete(lua.events_key(meta.reply_id))  # evicted, say; meta still promises three events
    assert await append(log, meta.reply_id, delta(4)) == [AppendResult(GAP, 1)]
    for reading in (log.read(meta.reply_id, 0), log.read(meta.reply_id, 2), collected(log, meta.reply_id)):
        with pytest.raises(ReplyUnknown):
            await reading
    with pytest.raises(ReplyUnknown):
        await log.claim(meta.reply_id, token)
    assert await log.restore(meta, 1)
    assert await outcomes(log, meta.reply_id, *deltas(1, 4)) == [APPENDED] * 4
    assert await log.read(meta.reply_id, 2) == [delta(3), delta(4)]


async def test_a_flushed_store_answers_a_gap_from_the_start(home: RedisHome, log: EventLog) -> None:
    reply_id = await created(log, *deltas(1, 3))
    home.lose_data()
    assert await append(log, reply_id, delta(4), done(5)) == [AppendResult(GAP, 1)] * 2
    assert await log.renew({reply_id: 1}) == {reply_id: False}


async def test_a_server_that_forgot_the_scripts_is_taught_again(log: EventLog, server: RedisServer) -> None:
    reply_id = await created(log, delta(1))
    with server.client() as client:
        client.script_flush()
    assert await outcomes(log, reply_id, delta(2)) == [APPENDED]
    assert await log.renew({reply_id: 1}) == {reply_id: True}


# stalling, dying, refusing


async def test_a_stalled_server_is_an_error_in_time_and_no_loss(log: EventLog, server: RedisServer) -> None:
    reply_id = await created(log, delta(1))
    server.pause()
    started = time.monotonic()
    calls = await asyncio.gather(
        log.append([pending(reply_id, delta(2))]),
        log.read(reply_id, 0),
        log.state(reply_id),
        log.renew({reply_id: 1}),
        log.create(new_meta()),
        collected(log, reply_id),
        log.attach(reply_id),
        log.is_attached(reply_id),
        log.request_cancel(reply_id),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in calls] == [LogUnavailable] * len(calls)
    assert not await log.healthy()
    assert time.monotonic() - started < DEADLINE_S + 2
    server.resume()
    await eventually(log.healthy)
    # the server may have taken the append that was given up; saying it again is safe either way
    assert await outcomes(log, reply_id, delta(2)) in ([APPENDED], [DUPLICATE])
    assert await log.read(reply_id, 0) == [delta(1), delta(2)]


async def test_a_dead_server_is_an_error_at_once_and_all_works_after_it(
    home: RedisHome, log: EventLog, server: RedisServer
) -> None:
    other = await home.open("g2")
    meta = new_meta()
    await log.create(meta)
    await append(log, meta.reply_id, delta(1))
    follower = asyncio.create_task(collected(other, meta.reply_id, 1))
    server.kill()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LogUnavailable):
            await log.append([pending(meta.reply_id, delta(2))])
        with pytest.raises(LogUnavailable):
            await follower
    server.start()
    await eventually(log.healthy)
    assert await append(log, meta.reply_id, delta(2)) == [AppendResult(GAP, 1)]
    assert await log.restore(meta, 1)
    assert await outcomes(log, meta.reply_id, delta(1), delta(2)) == [APPENDED] * 2

    heard = aiter(log.cancels())  # and the inbox listens again
    await other.request_cancel(meta.reply_id)
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(heard) == meta.reply_id


async def test_a_log_can_start_and_close_while_the_server_is_down(server: RedisServer) -> None:
    server.kill()
    log = RedisEventLog(server.url, "g1")
    await log.start()
    assert not await log.healthy()
    with pytest.raises(LogUnavailable):
        await log.create(new_meta())
    server.start()
    await eventually(log.healthy)
    await created(log, delta(1))
    server.kill()
    async with asyncio.timeout(DEADLINE_S):
        await log.close()


async def test_a_full_store_is_an_outage_and_not_a_refusal(log: EventLog, server: RedisServer) -> None:
    reply_id = await created(log, delta(1))
    with server.client() as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(LogUnavailable, match="OutOfMemory"):
            await append(log, reply_id, delta(2))
        client.config_set("maxmemory", 0)
    assert await outcomes(log, reply_id, delta(2)) == [APPENDED]


@pytest.mark.parametrize("key_of", [lua.events_key, lua.meta_key, lua.watch_key, lua.gone_key])
async def test_a_key_of_another_type_harms_only_its_reply(
    log: EventLog, server: RedisServer, key_of: Callable[[str], str]
) -> None:
    odd, sound = new_meta(), new_meta()
    for meta in (odd, sound):
        await log.create(meta)
    with server.client() as client:
        client.delete(key_of(odd.reply_id))
        client.rpush(key_of(odd.reply_id), "what is this")
    answers = await log.append([pending(odd.reply_id, delta(1)), pending(sound.reply_id, delta(1))])
    assert answers[1] == [AppendResult(APPENDED, 2)]
    if key_of in (lua.events_key, lua.meta_key):
        assert answers[0] == [AppendResult(GAP, 1)]
        with pytest.raises(ReplyUnknown):
            await log.read(odd.reply_id, 0)
        assert await log.restore(odd, 1)
        assert await outcomes(log, odd.reply_id, delta(1)) == [APPENDED]
    with pytest.raises(ReplyExists):
        await log.create(odd)
    renewed = await log.renew({odd.reply_id: 1, sound.reply_id: 1})
    assert renewed[sound.reply_id]
    await log.attach(odd.reply_id, sound.reply_id)
    assert not await log.is_attached(odd.reply_id) or key_of is not lua.watch_key
    assert await log.is_attached(sound.reply_id)
    await log.detach(odd.reply_id)


async def test_an_inbox_full_of_rubbish_is_read_past(
    home: RedisHome, log: EventLog, server: RedisServer
) -> None:
    with server.client() as client:
        client.xadd("baton:inbox:g1", {"hint": b"\xff\xfe", "seq": "x"})
        client.xadd("baton:inbox:g1", {"other": "x"})
    reply_id = await created(log)
    other = await home.open("g2")
    await other.request_cancel(reply_id)
    async with asyncio.timeout(DEADLINE_S):
        assert await anext(aiter(log.cancels())) == reply_id


# what it costs


async def test_many_replies_are_appended_in_one_round_trip(log: EventLog, server: RedisServer) -> None:
    ids = [await created(log) for _ in range(50)]
    await log.append([pending(reply_id, delta(1)) for reply_id in ids])  # the server knows the script now
    before = {command: server.num_calls(command) for command in ("evalsha", "eval")}
    await log.append([pending(reply_id, *deltas(2, 9)) for reply_id in ids])
    await log.renew(dict.fromkeys(ids, 1))
    await log.attach(*ids)
    after = {command: server.num_calls(command) for command in ("evalsha", "eval")}
    # renew and attach run for the first time: EVALSHA fails, EVAL teaches
    assert after["evalsha"] + after["eval"] - before["evalsha"] - before["eval"] <= 1 + 2 * 2
    assert await log.read(ids[-1], 0) == list(deltas(1, 9))


async def test_many_followers_share_few_connections(home: RedisHome, server: RedisServer) -> None:
    owner, reader = await home.open("g1"), await home.open("g2", max_connections=4, lease_s=30.0)
    ids = [await created(owner, delta(1)) for _ in range(40)]
    await reader.attach(*ids)
    followers = [asyncio.create_task(collected(reader, reply_id)) for reply_id in ids for _ in range(5)]
    for seq in range(2, 10):
        await owner.append([pending(reply_id, delta(seq)) for reply_id in ids])
    most = num_connections(server)
    await owner.append([pending(reply_id, done(10)) for reply_id in ids])
    async with asyncio.timeout(10):
        assert await asyncio.gather(*followers) == [[*deltas(1, 9), done(10)]] * len(followers)
    assert most <= (16 + 1) + (4 + 1)  # each log's pool and its one blocking reader
    with server.client() as client:
        blocked = [entry for entry in client.client_list() if "b" in entry["flags"]]
    assert len(blocked) <= 2


async def test_cancelled_calls_leave_no_poisoned_connection(home: RedisHome, server: RedisServer) -> None:
    log = await home.open("g1", max_connections=2)
    first, second = await created(log, *deltas(1, 2)), await created(log, *deltas(1, 3))
    for turns in range(40):  # cut off at every point of its way
        call = asyncio.create_task(log.read(first, 0))
        for _ in range(turns % 20):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() or call.result() == list(deltas(1, 2))
        assert await log.read(second, 0) == list(deltas(1, 3))
        assert (await log.state(first)).last_seq == 2
    assert num_connections(server) <= 2 + 1


async def test_a_cancelled_follower_ends_at_once_and_lets_go(home: RedisHome, log: EventLog) -> None:
    reply_id = await created(log, delta(1))
    for turns in range(30):
        follower = asyncio.create_task(collected(log, reply_id))
        for _ in range(turns):
            await asyncio.sleep(0)
        follower.cancel()
        async with asyncio.timeout(0.5):
            await asyncio.wait([follower])
        assert follower.cancelled()


async def test_logs_close_promptly_whenever_they_are_closed(server: RedisServer) -> None:
    started = time.monotonic()
    for turns in range(40):
        log = RedisEventLog(server.url, "g9")
        await log.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await log.close()
    assert time.monotonic() - started < 8
    await eventually(lambda: num_connections(server) == 0)
