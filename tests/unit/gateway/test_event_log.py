"""The contract of the event log, held by both of its homes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.event_log import (
    SCHEMA_VERSION,
    AppendResult,
    CursorConflict,
    EventLog,
    InvalidReplyId,
    ReplyExists,
    ReplyGone,
    ReplyUnknown,
)
from gateway.events import Event, EventKind, ReplyStatus
from tests.redis_server import RedisServer
from tests.unit.gateway.event_logs import (
    APPENDED,
    DUPLICATE,
    FENCED,
    GAP,
    LogHome,
    append,
    delta,
    deltas,
    done,
    home_of,
    new_meta,
    outcomes,
    pending,
)
from tests.waiting import eventually

KINDS = ("memory", "redis")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def home(kind: str, server: RedisServer) -> AsyncIterator[LogHome]:
    async with home_of(kind, server) as home:
        yield home


@pytest.fixture
async def log(home: LogHome) -> EventLog:
    return await home.open("g1")


@pytest.fixture
async def reply_id(log: EventLog) -> str:
    meta = new_meta()
    await log.create(meta)
    return meta.reply_id


async def collected(log: EventLog, reply_id: str, after: int = 0) -> list[Event]:
    async with aclosing(log.follow(reply_id, after)) as pages:
        return [event async for page in pages for event in page]


# creating


async def test_a_new_reply_has_its_meta_and_an_empty_log(log: EventLog) -> None:
    meta = new_meta(
        owner_hash="k",
        format_options={"include_usage": True},
        request={"messages": [{"role": "user", "content": "naïve \u2028 🙂"}]},
        prompt_token_ids=(1, 2, 3),
        seed=2**63 - 1,
        traceparent="00-ab-cd-01",
        on_disconnect="continue",
        created=1_700_000_000,
    )
    assert await log.create(meta) == 1
    assert await log.meta(meta.reply_id) == meta
    state = await log.state(meta.reply_id)
    assert (state.status, state.epoch, state.last_seq, state.terminal_seq) == (ReplyStatus.QUEUED, 1, 0, None)
    assert (state.cancel_requested, state.owner_gateway) == (False, "g1")
    assert await log.read(meta.reply_id, 0) == []


async def test_an_id_is_used_once(home: LogHome, log: EventLog, reply_id: str) -> None:
    await append(log, reply_id, delta(1))
    other = await home.open("g2")
    with pytest.raises(ReplyExists):
        await other.create(new_meta(reply_id=reply_id))
    assert await log.read(reply_id, 0) == [delta(1)]


@pytest.mark.parametrize("bad_id", ["", "short", "x" * 65, "a" * 16 + "}", "a" * 16 + "\n", "é" * 20])
async def test_what_is_no_reply_id_never_becomes_a_key(log: EventLog, bad_id: str) -> None:
    calls = [
        log.create(new_meta(reply_id=bad_id)),
        log.restore(new_meta(reply_id=bad_id), 1),
        log.append([pending(bad_id, delta(1))]),
        log.read(bad_id, 0),
        collected(log, bad_id),
        log.meta(bad_id),
        log.state(bad_id),
        log.claim(bad_id, ""),
        log.renew({bad_id: 1}),
        log.attach(bad_id),
        log.detach(bad_id),
        log.is_attached(bad_id),
        log.request_cancel(bad_id),
    ]
    for call in calls:
        with pytest.raises(InvalidReplyId):
            await call


async def test_a_reply_that_never_was_is_unknown(log: EventLog) -> None:
    reply_id = new_meta().reply_id
    for call in (
        log.read(reply_id, 0),
        collected(log, reply_id),
        log.meta(reply_id),
        log.state(reply_id),
        log.claim(reply_id, ""),
        log.request_cancel(reply_id),
    ):
        with pytest.raises(ReplyUnknown):
            await call
    assert await log.renew({reply_id: 1}) == {reply_id: False}
    await log.attach(reply_id)
    await log.detach(reply_id)
    assert not await log.is_attached(reply_id)


# appending


async def test_events_come_back_as_they_were(log: EventLog, reply_id: str) -> None:
    events = [
        Event(1, EventKind.CREATED, {"created": 1, "model": "m", "num_prompt_tokens": 3, "num_choices": 1}),
        delta(2, text="\u0000\r\n\u2028\ufeff🙂"),
        Event(3, EventKind.DELTA, {"logprobs": [{"logprob": -1.25e-7, "top": [[1, "a", -0.5]]}], "x": None}),
    ]
    assert await append(log, reply_id, *events) == [AppendResult(APPENDED, 4)] * 3
    assert await log.read(reply_id, 0) == events
    state = await log.state(reply_id)
    assert (state.status, state.last_seq) == (ReplyStatus.RUNNING, 3)


async def test_what_was_appended_never_changes(log: EventLog, reply_id: str) -> None:
    await append(log, reply_id, *deltas(1, 3))
    again = await append(log, reply_id, delta(2, text="other"), delta(3), delta(4))
    assert again == [AppendResult(DUPLICATE, 5), AppendResult(DUPLICATE, 5), AppendResult(APPENDED, 5)]
    assert await log.read(reply_id, 0) == list(deltas(1, 4))


async def test_an_event_goes_only_after_its_predecessor(log: EventLog, reply_id: str) -> None:
    assert await append(log, reply_id, delta(2)) == [AppendResult(GAP, 1)]
    await append(log, reply_id, delta(1))
    assert await append(log, reply_id, delta(4), delta(2)) == [
        AppendResult(GAP, 3),
        AppendResult(APPENDED, 3),
    ]
    assert await outcomes(log, reply_id, delta(0)) == [FENCED]
    assert await log.read(reply_id, 0) == list(deltas(1, 2))


async def test_a_reply_that_is_not_there_is_a_gap_from_the_start(log: EventLog) -> None:
    assert await append(log, new_meta().reply_id, delta(5), delta(6)) == [AppendResult(GAP, 1)] * 2


async def test_nothing_follows_a_terminal_event(log: EventLog, reply_id: str) -> None:
    assert await outcomes(log, reply_id, delta(1), done(2), delta(3)) == [APPENDED, APPENDED, FENCED]
    assert await append(log, reply_id, delta(3)) == [AppendResult(FENCED, 3)]
    assert await outcomes(log, reply_id, done(2)) == [DUPLICATE]
    assert await outcomes(log, reply_id, delta(3, epoch=2), epoch=2) == [FENCED]
    state = await log.state(reply_id)
    assert (state.terminal_seq, state.last_seq, state.status) == (2, 2, ReplyStatus.DONE)


async def test_an_epoch_fences_all_below_it(log: EventLog, reply_id: str) -> None:
    await append(log, reply_id, delta(1))
    assert await outcomes(log, reply_id, delta(1), delta(2, epoch=3), epoch=3) == [DUPLICATE, APPENDED]
    assert (await log.state(reply_id)).epoch == 3
    assert await outcomes(log, reply_id, delta(1), delta(3), epoch=1) == [FENCED, FENCED]
    assert await outcomes(log, reply_id, delta(3, epoch=2), epoch=2) == [FENCED]
    assert await outcomes(log, reply_id, delta(2, epoch=4), epoch=4) == [FENCED]  # epoch 3 wrote that one
    assert [event.epoch for event in await log.read(reply_id, 0)] == [1, 3]


async def test_the_logged_mark_is_true_once_it_is_true(log: EventLog, reply_id: str) -> None:
    unlogged = Event(1, EventKind.DELTA, {"text": "x"}, 1, logged=False)
    await append(log, reply_id, unlogged)
    assert [event.logged for event in await log.read(reply_id, 0)] == [True]


async def test_replies_of_one_batch_never_affect_each_other(log: EventLog) -> None:
    metas = [new_meta() for _ in range(5)]
    good, fenced, gapped, ended, _missing = (meta.reply_id for meta in metas)
    for meta in metas[:4]:
        await log.create(meta)
    await append(log, fenced, delta(1, epoch=2), epoch=2)
    await append(log, ended, done(1))
    batch = [
        pending(fenced, delta(2)),
        pending(metas[4].reply_id, delta(1)),
        pending(gapped, delta(3)),
        pending(ended, delta(2)),
        pending(good, *deltas(1, 3)),
    ]
    answers = [[result.outcome for result in results] for results in await log.append(batch)]
    assert answers == [[FENCED], [GAP], [GAP], [FENCED], [APPENDED] * 3]
    assert await log.read(good, 0) == list(deltas(1, 3))
    assert await log.append([]) == []


# reading and following


async def test_reading_pages_from_any_cursor(log: EventLog, reply_id: str) -> None:
    await append(log, reply_id, *deltas(1, 10))
    for after in range(11):
        assert await log.read(reply_id, after) == list(deltas(after + 1, 10))
    assert await log.read(reply_id, 3, limit=4) == list(deltas(4, 7))
    assert await log.read(reply_id, 11) == []
    assert await log.read(reply_id, -5) == list(deltas(1, 10))


async def test_followers_catch_up_and_go_on_live_to_the_end(
    home: LogHome, log: EventLog, reply_id: str
) -> None:
    await append(log, reply_id, *deltas(1, 600))
    elsewhere = await home.open("g2", lease_s=30.0)
    await elsewhere.attach(reply_id)
    cursors = [0, 1, 599, 600]
    followers = [
        asyncio.create_task(collected(reader, reply_id, after))
        for reader in (log, elsewhere)
        for after in cursors
    ]
    for seq in range(601, 641):
        await append(log, reply_id, delta(seq))
    await append(log, reply_id, done(641))
    whole = [*deltas(1, 640), done(641)]
    async with asyncio.timeout(5):
        assert await asyncio.gather(*followers) == [whole[after:] for _ in range(2) for after in cursors]
        assert await collected(elsewhere, reply_id, 641) == []


async def test_a_follower_hears_of_an_event_soon(home: LogHome, log: EventLog, reply_id: str) -> None:
    elsewhere = await home.open("g2")
    await elsewhere.attach(reply_id)
    async with aclosing(elsewhere.follow(reply_id, 0)) as pages:
        for seq in range(1, 6):
            coming = asyncio.create_task(anext(pages))
            await asyncio.sleep(0.02)  # so that it waits for news rather than finding it
            await append(log, reply_id, delta(seq))
            async with asyncio.timeout(0.5):  # below the slow poll: the wake hint did it
                assert await coming == [delta(seq)]


async def test_following_what_is_lost_or_expired_ends_in_an_error(home: LogHome) -> None:
    log = await home.open("g1", reply_ttl_s=0.05)
    meta = new_meta()
    await log.create(meta)
    await append(log, meta.reply_id, done(1))
    await eventually(lambda: _is_gone(log, meta.reply_id))
    with pytest.raises(ReplyGone):
        await collected(log, meta.reply_id)


async def test_a_follower_is_never_given_another_history(home: LogHome, log: EventLog) -> None:
    """Same reply, data lost and written anew by somebody else between two looks of the follower."""
    meta = new_meta()
    await log.create(meta)
    await append(log, meta.reply_id, *deltas(1, 2))
    async with (
        aclosing(log.follow(meta.reply_id, 0)) as same,
        aclosing(log.follow(meta.reply_id, 0)) as other,
    ):
        for pages in (same, other):
            assert await anext(pages) == list(deltas(1, 2))
        home.lose_data()
        await log.restore(meta, 1)
        await append(log, meta.reply_id, *deltas(1, 3))
        assert await anext(same) == [delta(3)]
        home.lose_data()
        await log.restore(meta, 2)
        await append(log, meta.reply_id, *deltas(1, 4, epoch=2), epoch=2)
        with pytest.raises(CursorConflict):
            await anext(other)


# owning


async def test_a_claim_raises_the_epoch_and_changes_the_lease(
    home: LogHome, log: EventLog, reply_id: str
) -> None:
    await append(log, reply_id, delta(1))
    before = await log.state(reply_id)
    heir = await home.open("g2")
    assert await heir.claim(reply_id, before.lease_token) == 2
    after = await heir.state(reply_id)
    assert (after.epoch, after.owner_gateway, after.last_seq) == (2, "g2", 1)
    assert after.lease_token != before.lease_token
    assert await outcomes(log, reply_id, delta(2)) == [FENCED]
    assert await log.renew({reply_id: 1}) == {reply_id: False}
    assert await outcomes(heir, reply_id, delta(2, epoch=2), epoch=2) == [APPENDED]


async def test_a_renewed_lease_cannot_be_claimed_with_the_old_token(home: LogHome, log: EventLog) -> None:
    live, ended = new_meta(), new_meta()
    for meta in (live, ended):
        await log.create(meta)
    await append(log, ended.reply_id, done(1))
    seen = (await log.state(live.reply_id)).lease_token
    unknown = new_meta().reply_id
    renewed = await log.renew({live.reply_id: 1, ended.reply_id: 1, unknown: 1})
    assert renewed == {live.reply_id: True, ended.reply_id: True, unknown: False}
    heir = await home.open("g2")
    assert await heir.claim(live.reply_id, seen) is None
    assert (await log.state(live.reply_id)).lease_token not in ("", seen)
    assert await heir.claim(ended.reply_id, (await log.state(ended.reply_id)).lease_token) is None
    assert await log.renew({}) == {}


async def test_of_many_claimers_exactly_one_wins(home: LogHome, log: EventLog, reply_id: str) -> None:
    token = (await log.state(reply_id)).lease_token
    heirs = [await home.open(f"g{n}") for n in range(2, 8)]
    won = await asyncio.gather(*(heir.claim(reply_id, token) for heir in heirs))
    assert sorted(won, key=lambda epoch: epoch or 0) == [None] * 5 + [2]
    assert (await log.state(reply_id)).owner_gateway == f"g{2 + won.index(2)}"


async def test_a_reply_of_a_newer_schema_is_left_alone(home: LogHome, log: EventLog) -> None:
    meta = new_meta(schema=SCHEMA_VERSION + 1)
    await log.create(meta)
    heir = await home.open("g2")
    assert (await heir.meta(meta.reply_id)).schema == SCHEMA_VERSION + 1
    assert await heir.claim(meta.reply_id, (await log.state(meta.reply_id)).lease_token) is None


# attaching and cancelling


async def test_marks_are_per_gateway(home: LogHome, log: EventLog, reply_id: str) -> None:
    other = await home.open("g2")
    assert not await log.is_attached(reply_id)
    await log.attach(reply_id, new_meta().reply_id)
    await other.attach(reply_id)
    await log.detach(reply_id)
    assert await log.is_attached(reply_id)
    await other.detach(reply_id)
    await other.detach(reply_id)
    assert not await log.is_attached(reply_id)


async def test_a_mark_expires_unless_renewed(home: LogHome, reply_id: str) -> None:
    brief, lasting = await home.open("g2", lease_s=0.05), await home.open("g3", lease_s=30.0)
    await brief.attach(reply_id)
    assert await lasting.is_attached(reply_id)

    async def is_unattended() -> bool:
        return not await lasting.is_attached(reply_id)

    await eventually(is_unattended, timeout=2)
    await lasting.attach(reply_id)
    await brief.attach(reply_id)
    assert await brief.is_attached(reply_id)


async def test_a_cancel_reaches_the_owner_wherever_it_is(home: LogHome, log: EventLog, reply_id: str) -> None:
    other = await home.open("g2")
    heard = aiter(log.cancels())
    await other.request_cancel(reply_id)
    async with asyncio.timeout(0.9):
        assert await anext(heard) == reply_id
    assert (await other.state(reply_id)).cancel_requested
    await log.request_cancel(reply_id)  # at the owner itself
    async with asyncio.timeout(0.9):
        assert await anext(heard) == reply_id


async def test_an_heir_hears_of_the_cancel_with_its_first_renewal(
    home: LogHome, log: EventLog, reply_id: str
) -> None:
    await log.request_cancel(reply_id)
    heir = await home.open("g2")
    epoch = await heir.claim(reply_id, (await heir.state(reply_id)).lease_token)
    assert epoch == 2
    assert await heir.renew({reply_id: epoch}) == {reply_id: True}
    async with asyncio.timeout(0.9):
        assert await anext(aiter(heir.cancels())) == reply_id


async def test_a_finished_reply_cannot_be_cancelled(log: EventLog, reply_id: str) -> None:
    await append(log, reply_id, done(1))
    await log.request_cancel(reply_id)
    assert not (await log.state(reply_id)).cancel_requested


# expiring and losing


async def _is_gone(log: EventLog, reply_id: str) -> bool:
    try:
        await log.read(reply_id, 0)
    except ReplyGone:
        return True
    return False


async def test_after_its_end_a_reply_expires_and_is_gone_not_unknown(home: LogHome) -> None:
    log = await home.open("g1", reply_ttl_s=0.1)
    meta = new_meta()
    await log.create(meta)
    await append(log, meta.reply_id, delta(1), done(2))
    assert await log.read(meta.reply_id, 0) == [delta(1), done(2)]
    await eventually(lambda: _is_gone(log, meta.reply_id), timeout=3)
    for call in (log.meta, log.state, log.request_cancel):
        with pytest.raises(ReplyGone):
            await call(meta.reply_id)
    with pytest.raises(ReplyGone):
        await log.claim(meta.reply_id, "")
    with pytest.raises(ReplyExists):
        await log.create(meta)
    assert not await log.restore(meta, 1)
    assert await append(log, meta.reply_id, delta(1)) == [AppendResult(FENCED, 1)]


async def test_a_live_reply_expires_only_when_nobody_renews_it(home: LogHome) -> None:
    log = await home.open("g1", safety_ttl_s=0.4)
    kept, left = new_meta(), new_meta()
    for meta in (kept, left):
        await log.create(meta)
        await append(log, meta.reply_id, delta(1))

    async def only_the_kept_one_is_left() -> bool:
        assert await log.renew({kept.reply_id: 1}) == {kept.reply_id: True}
        try:
            await log.state(left.reply_id)
        except ReplyUnknown:
            return True
        return False

    await eventually(only_the_kept_one_is_left, timeout=3)
    assert await log.read(kept.reply_id, 0) == [delta(1)]


async def test_a_lost_log_is_restored_and_filled_again(home: LogHome, log: EventLog) -> None:
    meta = new_meta(prompt_token_ids=(1, 2))
    await log.create(meta)
    await append(log, meta.reply_id, *deltas(1, 3))
    home.lose_data()
    with pytest.raises(ReplyUnknown):
        await log.read(meta.reply_id, 0)
    assert await append(log, meta.reply_id, delta(4)) == [AppendResult(GAP, 1)]
    assert await log.restore(meta, 2)
    assert await log.meta(meta.reply_id) == meta
    assert await outcomes(log, meta.reply_id, *deltas(1, 3), delta(4, epoch=2), epoch=2) == [APPENDED] * 4
    assert [event.epoch for event in await log.read(meta.reply_id, 0)] == [1, 1, 1, 2]
    assert (await log.state(meta.reply_id)).epoch == 2


async def test_restoring_leaves_what_is_intact_and_yields_to_a_higher_epoch(
    home: LogHome, log: EventLog
) -> None:
    meta = new_meta()
    await log.create(meta)
    await append(log, meta.reply_id, *deltas(1, 3))
    assert await log.restore(meta, 1)
    assert await log.read(meta.reply_id, 0) == list(deltas(1, 3))
    heir = await home.open("g2")
    assert await heir.claim(meta.reply_id, (await log.state(meta.reply_id)).lease_token) == 2
    assert not await log.restore(meta, 1)


# any interleaving

CLAIM, OWNERS = 0, ("g1", "g2")
step = st.tuples(st.sampled_from(OWNERS), st.integers(CLAIM, 3))  # claim, or append so many events
steps = st.lists(st.lists(step, min_size=1, max_size=3), min_size=1, max_size=12)  # inner: at the same time


@given(steps=steps)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_any_interleaving_of_two_owners_leaves_one_history(
    kind: str, server: RedisServer, steps: list[list[tuple[str, int]]]
) -> None:
    """Contiguous, with epochs that never fall, and nothing once read ever changes."""

    async def play() -> None:
        async with home_of(kind, server) as home:
            logs = {name: await home.open(name) for name in OWNERS}
            meta = new_meta()
            await logs["g1"].create(meta)
            epochs, heads = {"g1": 1, "g2": 0}, {"g1": 0, "g2": 0}

            async def act(name: str, amount: int) -> None:
                log = logs[name]
                if amount == CLAIM:
                    epoch = await log.claim(meta.reply_id, (await log.state(meta.reply_id)).lease_token)
                    if epoch is not None:
                        epochs[name], heads[name] = epoch, (await log.state(meta.reply_id)).last_seq
                    return
                first, epoch = heads[name] + 1, epochs[name]
                events = [delta(first + n, epoch, text=f"{name} {epoch}") for n in range(amount)]
                for outcome in await outcomes(log, meta.reply_id, *events, epoch=epoch):
                    if epochs[name] == epoch:
                        heads[name] += outcome is APPENDED

            seen: list[Event] = []
            for together in steps:
                await asyncio.gather(*(act(name, amount) for name, amount in together))
                history = await logs["g2"].read(meta.reply_id, 0)
                assert history[: len(seen)] == seen
                assert [event.seq for event in history] == list(range(1, len(history) + 1))
                by_epoch = [event.epoch for event in history]
                assert by_epoch == sorted(by_epoch)
                assert all(event.payload["text"].endswith(f" {event.epoch}") for event in history)
                seen = history

    asyncio.run(play())
