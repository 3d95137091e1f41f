"""The official client against a real server, and the traces that requests leave."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from gateway.errors import Unavailable
from gateway.owned_reply import OwnedReply
from tests.unit.gateway.served_gateway import QUESTION, TRACEPARENT, Served, fail, say, saying, served
from tests.waiting import eventually


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as running:
        yield running


async def test_the_openai_client_through_keepalives(tmp_path: Path) -> None:
    async with served(tmp_path, keepalive_s=0.05) as world:
        first_text = asyncio.Event()

        async def starts_late(reply: OwnedReply) -> None:
            await first_text.wait()
            await saying("Hello", " world")(reply)

        world.generations.script = starts_late
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{world.port}/v1", api_key="none", max_retries=0
        )
        stream = await client.chat.completions.create(
            model="scripted", stream=True, stream_options={"include_usage": True}, **QUESTION
        )
        asyncio.get_running_loop().call_later(0.3, first_text.set)  # six keepalives
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "Hello world"
        assert chunks[-1].usage is not None
        assert (chunks[-1].model_extra or {})["sequence_number"] > 0
        buffered = await client.chat.completions.create(model="scripted", **QUESTION)
        assert buffered.choices[0].message.content == text


async def test_the_openai_client_raises_what_goes_wrong_in_mid_stream(world: Served) -> None:
    async def breaks(reply: OwnedReply) -> None:
        say(reply, "half")
        fail(reply, Unavailable("no worker is left"))

    world.generations.script = breaks
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{world.port}/v1", api_key="none", max_retries=0)
    stream = await client.chat.completions.create(model="scripted", stream=True, **QUESTION)
    with pytest.raises(openai.APIError, match="no worker is left"):
        _ = [chunk async for chunk in stream]


async def test_a_request_has_a_span_until_its_stream_ends_and_a_resume_one_linked_to_it(
    world: Served,
) -> None:
    posted = await world.http.post(
        "/v1/chat/completions",
        json={**QUESTION, "stream": True},
        headers={"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
    )
    await world.get(posted.headers["location"])
    await eventually(lambda: len(world.spans.get_finished_spans()) == 2)
    created, resumed = world.spans.get_finished_spans()
    assert (created.name, resumed.name) == ("POST /v1/chat/completions", "GET /v1/streams/{id}")
    assert f"{created.context.trace_id:032x}" == "a" * 32
    assert not created.links
    (link,) = resumed.links
    assert f"00-{link.context.trace_id:032x}-{link.context.span_id:016x}-01" == TRACEPARENT
    assert resumed.context.trace_id != created.context.trace_id


@pytest.mark.parametrize(("num_entries", "kept"), [(1, 1), (32, 0)])
async def test_a_trace_state_too_large_for_grpc_is_not_passed_on(
    world: Served, num_entries: int, kept: int
) -> None:
    state = ",".join(f"key{number}={'v' * 250}" for number in range(num_entries))
    traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await world.http.post(
        "/v1/chat/completions", json=QUESTION, headers={"traceparent": traceparent, "tracestate": state}
    )
    await eventually(lambda: len(world.spans.get_finished_spans()) == 1)
    (span,) = world.spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "a" * 32
    assert len(span.context.trace_state) == kept
