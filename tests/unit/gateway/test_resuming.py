"""Resuming over a real server: every cut joins byte for byte, every impossible cursor has its status."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.owned_reply import OwnedReply
from tests.e2e.sse_client import frames
from tests.unit.gateway.served_gateway import QUESTION, Served, finish, is_openai_error, say, saying, served
from tests.waiting import eventually


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as running:
        yield running


async def resume(world: Served, event_id: str) -> httpx.Response:
    return await world.get(f"/v1/streams/{event_id.partition(':')[0]}", Last_Event_ID=event_id)


async def test_cut_after_every_event_the_rest_joins_byte_for_byte(world: Served) -> None:
    world.generations.script = saying("a\u2028b", "é\x85", "🏃\r\n", "d")
    body = (await world.streamed(stream_options={"include_usage": True})).content
    events = frames(body)
    assert not {"\x85", "\u2028", "\u2029", "\r"} & set(body.decode())
    end = 0
    for event in events[:-1]:
        end = body.index(b"\n\n", end) + 2
        rest = await resume(world, event.event_id)
        assert body[:end] + rest.content == body
        after = await world.get(rest.url.path + f"?after={event.event_id}")
        assert after.content == rest.content
    assert (await world.get(rest.url.path)).content == body
    assert (await resume(world, events[-1].event_id)).status_code == 204


async def test_the_native_format_is_contiguous(world: Served) -> None:
    location = (await world.streamed()).headers["location"]
    events = frames((await world.get(f"{location}?format=baton")).content)
    documents = [json.loads(event.data) for event in events]
    assert [document["seq"] for document in documents] == list(range(1, len(events) + 1))
    assert documents[0]["kind"] == "created"
    assert documents[-1]["kind"] == "done"
    wrong = await world.get(f"{location}?format=telegram")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "format")


async def test_cursors_that_cannot_be_honoured(world: Served) -> None:
    last = frames((await world.streamed()).content)[-1].event_id
    reply_id, _, seq = last.partition(":")
    path = f"/v1/streams/{reply_id}"
    for malformed in ("nonsense", f"{reply_id}:-1", f"{reply_id}:x", "0" * 32 + ":1"):
        assert (await world.get(path, Last_Event_ID=malformed)).status_code == 400
        assert (await world.get(f"{path}?after={malformed}")).status_code == 400
    for ahead in (f"{reply_id}:{int(seq) + 1}", f"{reply_id}:999999999999", f"{reply_id}:2.9"):
        response = await world.get(path, Last_Event_ID=ahead)
        assert response.status_code == 409
        assert response.headers["x-should-retry"] == "false"
        assert is_openai_error(response)
    header_wins = await world.get(f"{path}?after=nonsense", Last_Event_ID=last)
    assert header_wins.status_code == 204


async def repost(world: Served, event_id: str) -> httpx.Response:
    return await world.http.post(
        "/v1/chat/completions", content=b"ignored", headers={"last-event-id": event_id}
    )


async def test_a_repost_resumes_and_starts_nothing(world: Served) -> None:
    body = (await world.streamed()).content
    events = frames(body)
    rest = await repost(world, events[1].event_id)
    assert body.endswith(rest.content)
    assert frames(rest.content) == events[2:]
    assert len(world.generations.specs) == 1
    assert (await repost(world, "0" * 32 + ":1")).status_code == 404
    assert (await repost(world, "nonsense")).status_code == 400
    assert len(world.generations.specs) == 1


async def test_a_repost_at_the_very_end_is_an_empty_stream(world: Served) -> None:
    last = frames((await world.streamed()).content)[-1].event_id
    rest = await repost(world, last)
    assert rest.status_code == 200
    assert rest.headers["content-type"].startswith("text/event-stream")
    assert rest.content == b""


async def test_a_resume_follows_what_is_still_being_said(world: Served) -> None:
    more = asyncio.Event()

    async def pauses(reply: OwnedReply) -> None:
        say(reply, "one")
        await more.wait()
        say(reply, " two")
        finish(reply)

    world.generations.script = pauses
    async with world.http.stream("POST", "/v1/chat/completions", json={**QUESTION, "stream": True}) as first:
        before = b""
        async for received in first.aiter_raw():
            before += received
            if b'"one"' in before and before.endswith(b"\n\n"):
                break
    await eventually(lambda: not world.is_followed)
    resumed = asyncio.create_task(resume(world, frames(before)[-1].event_id))
    await eventually(lambda: world.is_followed)
    more.set()
    joined = frames(before) + frames((await resumed).content)
    assert "".join(event.text for event in joined) == "one two"
    assert len({event.event_id for event in joined}) == len(joined)


async def test_a_head_request_is_no_reader(world: Served) -> None:
    location = (await world.streamed()).headers["location"]
    async with asyncio.timeout(5):
        looked = await world.http.head(location)
    assert (looked.status_code, looked.content) == (200, b"")
    assert looked.headers["content-type"].startswith("text/event-stream")
    assert not world.gateway.open_streams
