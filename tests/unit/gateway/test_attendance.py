"""Who counts as listening, seen from one gateway."""

import asyncio
from typing import Any

from gateway.attendance import Attendance
from gateway.event_log_memory import MemoryEventLog
from tests.unit.gateway.event_logs import new_meta
from tests.unit.gateway.hubs import ManualClock, SteeredLog


class Room:
    """One reply watched by one gateway's attendance."""

    def __init__(self, *, grace_s: float) -> None:
        self.clock = ManualClock()
        self.left: list[str] = []
        log = MemoryEventLog("g1")
        self.steered = SteeredLog(log)
        steered: Any = self.steered
        self.attendance = Attendance(steered, grace_s=grace_s, clock=self.clock)
        self.meta = new_meta()
        self.log = log

    async def prepare(self) -> str:
        await self.log.create(self.meta)
        self.attendance.watch(self.meta.reply_id)
        return self.meta.reply_id

    async def note_left(self, reply_id: str) -> None:
        self.left.append(reply_id)


async def test_only_the_last_client_to_leave_takes_the_mark_back() -> None:
    room = Room(grace_s=10)
    reply_id = await room.prepare()
    async with room.attendance.attached(reply_id, room.note_left):
        async with room.attendance.attached(reply_id, room.note_left):
            assert await room.log.is_attached(reply_id)
        await room.attendance.all_left()
        assert await room.log.is_attached(reply_id)
        assert room.left == []
    await room.attendance.all_left()
    assert not await room.log.is_attached(reply_id)
    assert room.left == [reply_id]


async def test_a_client_that_comes_back_while_the_mark_is_taken_back_has_one() -> None:
    room = Room(grace_s=10)
    reply_id = await room.prepare()
    for turns in range(10):
        async with room.attendance.attached(reply_id, room.note_left):
            pass
        for _ in range(turns):
            await asyncio.sleep(0)
        async with room.attendance.attached(reply_id, room.note_left):
            await room.attendance.all_left()
            assert await room.log.is_attached(reply_id)
            assert not await room.attendance.is_unattended(reply_id)


async def test_a_mark_set_while_the_old_one_is_being_taken_back_stays() -> None:
    room = Room(grace_s=10)
    reply_id = await room.prepare()
    room.steered.detaching.clear()
    async with room.attendance.attached(reply_id, room.note_left):
        pass
    await asyncio.sleep(0)  # the detach is on its way
    async with room.attendance.attached(reply_id, room.note_left):
        room.steered.detaching.set()
        await room.attendance.all_left()
        assert await room.log.is_attached(reply_id)


async def test_no_grace_means_at_once_but_only_after_a_first_client_could_come() -> None:
    room = Room(grace_s=0)
    reply_id = await room.prepare()
    assert not await room.attendance.is_abandoned(reply_id)
    room.clock.now += 0.9
    assert not await room.attendance.is_abandoned(reply_id)
    room.clock.now += 0.2
    assert await room.attendance.is_abandoned(reply_id)
    async with room.attendance.attached(reply_id, room.note_left):
        assert not await room.attendance.is_abandoned(reply_id)
    await room.attendance.all_left()
    assert await room.attendance.is_abandoned(reply_id)


async def test_marks_lapse_in_an_outage_so_the_grace_starts_anew_after_it() -> None:
    room = Room(grace_s=10)
    reply_id = await room.prepare()
    room.clock.now += 100
    room.attendance.restart_grace()
    assert not await room.attendance.is_abandoned(reply_id)
    room.clock.now += 9
    assert not await room.attendance.is_abandoned(reply_id)
    room.clock.now += 2
    assert await room.attendance.is_abandoned(reply_id)


async def test_clients_come_and_go_while_the_log_is_down() -> None:
    room = Room(grace_s=10)
    reply_id = await room.prepare()
    room.steered.down = True
    async with room.attendance.attached(reply_id, room.note_left):
        room.steered.down = False
        assert not await room.log.is_attached(reply_id)
        await room.attendance.renew_marks()
        assert await room.log.is_attached(reply_id)
        room.steered.down = True
    await room.attendance.all_left()
    assert room.left == [reply_id]  # the mark expires by itself


async def test_what_is_not_watched_is_nobodys_to_abandon() -> None:
    room = Room(grace_s=0)
    reply_id = await room.prepare()
    room.attendance.unwatch(reply_id)
    room.clock.now += 100
    assert not await room.attendance.is_abandoned(reply_id)
