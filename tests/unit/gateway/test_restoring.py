"""Resuming elsewhere while the log lacks what its client has seen: after an outage, after lost data."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.event_log import ReplyUnknown
from gateway.events import EventKind
from gateway.replies import ReplyHub
from tests.redis_server import RedisServer
from tests.unit.gateway.event_logs import LogHome, home_of, new_meta
from tests.unit.gateway.hubs import Hubs, SteeredLog, finish, opened, say, steered
from tests.unit.gateway.served_gateway import Served, served
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def home(server: RedisServer) -> AsyncIterator[LogHome]:
    async with home_of("redis", server) as home:
        yield home


@pytest.fixture
async def hubs(home: LogHome) -> AsyncIterator[Hubs]:
    async with Hubs(home) as hubs:
        yield hubs


@pytest.fixture
async def elsewhere(home: LogHome, tmp_path: Path) -> AsyncIterator[Served]:
    """A gateway that does not own what `owner` writes."""
    log: Any = SteeredLog(await home.open("g2"))
    async with served(tmp_path, log=log) as running:
        yield running


@pytest.fixture
async def owner(hubs: Hubs) -> ReplyHub:
    return await hubs.open("g1")


@pytest.mark.parametrize("epoch", ["", ".1"])
@pytest.mark.parametrize("trouble", ["outage", "loss"])
async def test_a_resume_waits_for_what_the_owner_has_yet_to_log(
    hubs: Hubs, owner: ReplyHub, elsewhere: Served, trouble: str, epoch: str
) -> None:
    reply = await opened(owner)
    reply.emit(EventKind.CREATED, {"created": 1, "model": "m", "num_prompt_tokens": 1, "num_choices": 1})
    say(reply, "a")
    await reply.flushed()
    steered(owner).down = True
    say(reply, "b")
    await eventually(lambda: len(reply.events) == 3)
    if trouble == "loss":
        hubs.lose_data()
    path = f"/v1/streams/{reply.meta.reply_id}"
    resuming = asyncio.create_task(
        elsewhere.get(f"{path}?format=baton", Last_Event_ID=f"{reply.meta.reply_id}:3{epoch}")
    )
    log = steered(elsewhere.gateway.hub)
    await eventually(lambda: log.num_asked > 1)
    assert not resuming.done()
    say(reply, "c")
    finish(reply)
    steered(owner).down = False
    response = await resuming
    assert response.status_code == 200
    assert [text in response.text for text in ('"a"', '"b"', '"c"')] == [False, False, True]


async def test_what_no_owner_restores_is_refused_after_a_lease(hubs: Hubs) -> None:
    reader = await hubs.open("g2", lease_s=0.1)
    missing = new_meta().reply_id
    await reader.until_logged(missing, 1, None)
    with pytest.raises(ReplyUnknown):
        await reader.state(missing)


async def test_an_event_of_a_history_that_was_taken_over_is_not_waited_for(hubs: Hubs) -> None:
    owner, heir = await hubs.open("g1", lease_s=60), await hubs.open("g2", lease_s=0.1)
    reply = await opened(owner)
    say(reply, "a")
    await reply.flushed()
    assert await heir.take_over(reply.meta.reply_id) is not None
    reader = await hubs.open("g3", lease_s=60)
    async with asyncio.timeout(5):
        await reader.until_logged(reply.meta.reply_id, 2, 1)
