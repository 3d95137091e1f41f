"""When an owner may be taken for dead, and when not."""

import asyncio
from typing import Any

import pytest

from gateway.event_log import ReplyUnknown
from gateway.event_log_memory import MemoryEventLog
from gateway.leases import lapsed_lease
from tests.unit.gateway.event_logs import append, done, new_meta
from tests.unit.gateway.hubs import ManualClock, SteeredLog
from tests.waiting import eventually

LEASE_S = 0.05  # how often it looks; time itself passes by the manual clock


class Watched:
    """A reply whose lease another gateway watches."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = MemoryEventLog("g1")
        self.steered = SteeredLog(self.log)
        self.meta = new_meta()
        self.num_looks = 0

    async def watch(self) -> "asyncio.Task[str | None]":
        await self.log.create(self.meta)
        steered: Any = self.steered
        watching = lapsed_lease(steered, self.meta.reply_id, lease_s=LEASE_S, clock=self.read_clock)
        return asyncio.create_task(watching)

    def read_clock(self) -> float:
        self.num_looks += 1
        return self.clock()

    async def looked(self) -> None:
        before = self.num_looks
        await eventually(lambda: self.num_looks > before)


async def test_a_token_unchanged_for_a_full_lease_has_lapsed() -> None:
    watched = Watched()
    watching = await watched.watch()
    await watched.looked()
    watched.clock.now += LEASE_S * 0.9
    await watched.looked()
    assert not watching.done()
    watched.clock.now += LEASE_S * 0.2
    assert await watching == (await watched.log.state(watched.meta.reply_id)).lease_token


async def test_one_renewal_shows_that_the_owner_lives() -> None:
    watched = Watched()
    watching = await watched.watch()
    await watched.looked()
    await watched.log.renew({watched.meta.reply_id: 1})
    watched.clock.now += LEASE_S * 10
    assert await watching is None


async def test_a_reply_that_ended_needs_no_heir() -> None:
    watched = Watched()
    watching = await watched.watch()
    await watched.looked()
    await append(watched.log, watched.meta.reply_id, done(1))
    assert await watching is None


async def test_an_outage_restarts_the_watch() -> None:
    watched = Watched()
    watching = await watched.watch()
    await watched.looked()
    watched.steered.down = True
    await eventually(lambda: watched.steered.num_refused > 0)
    watched.clock.now += LEASE_S * 10  # the owner could not renew either
    watched.steered.down = False
    await watched.looked()
    await watched.looked()
    assert not watching.done()
    watched.clock.now += LEASE_S * 1.1
    assert await watching is not None


async def test_what_is_not_there_cannot_be_watched() -> None:
    steered: Any = SteeredLog(MemoryEventLog("g1"))
    with pytest.raises(ReplyUnknown):
        await lapsed_lease(steered, new_meta().reply_id, lease_s=LEASE_S, clock=ManualClock())
