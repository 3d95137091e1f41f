"""The HTTP surface over a real server: answers, refusals, probes, keys, and a log that is down."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.errors import ContextTooLong, DeadlineExceeded, GatewayError, Overloaded, Unavailable
from gateway.event_log import LogUnavailable
from gateway.event_log_memory import MemoryEventLog
from gateway.owned_reply import OwnedReply
from tests.e2e.sse_client import frames
from tests.unit.gateway.served_gateway import QUESTION, Served, fail, is_openai_error, say, served


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as running:
        yield running


async def test_a_stream_and_its_headers(world: Served) -> None:
    response = await world.streamed()
    reply_id = world.reply.meta.reply_id
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["location"] == f"/v1/streams/{reply_id}"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert "baton-resumable" not in response.headers
    events = frames(response.content)
    assert "".join(event.text for event in events) == "Hello world"
    assert events[-1].data == "[DONE]"
    assert [event.event_id.partition(":")[0] for event in events] == [reply_id] * len(events)


async def test_streamed_and_buffered_say_the_same(world: Served) -> None:
    options = {"stream_options": {"include_usage": True}}
    streamed = [json.loads(e.data) for e in frames((await world.streamed(**options)).content)[:-1]]
    response = await world.chat()
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "Hello world"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["usage"] == body["usage"]
    assert response.headers["location"].endswith(body["id"])


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (ContextTooLong("long", param="messages"), 400),
        (Overloaded("full"), 429),
        (Unavailable("nobody"), 503),
    ],
)
@pytest.mark.parametrize("how", [{}, {"stream": True}])
async def test_a_refusal_before_admission_is_an_http_status(
    world: Served, refusal: GatewayError, status: int, how: dict[str, bool]
) -> None:
    world.generations.refusal = refusal
    response = await world.chat(**how)
    assert response.status_code == status
    assert is_openai_error(response)
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_a_failure_after_admission_is_in_band_for_streams_and_a_status_for_buffered(
    world: Served,
) -> None:
    async def runs_out_of_time(reply: OwnedReply) -> None:
        say(reply, "half")
        fail(reply, DeadlineExceeded("too late"))

    world.generations.script = runs_out_of_time
    *_, text, last = frames((await world.streamed()).content)
    assert text.text == "half"
    assert json.loads(last.data)["error"]["code"] == "timeout"
    buffered = await world.chat()
    assert buffered.status_code == 504
    assert is_openai_error(buffered)


async def test_bad_bodies(world: Served) -> None:
    async def post(content: bytes) -> httpx.Response:
        return await world.http.post("/v1/chat/completions", content=content)

    assert (await post(b"{")).status_code == 400
    assert (await post(b'{"messages": []}')).json()["error"]["param"] == "messages"
    negative = await world.chat(max_tokens=-1)
    assert (negative.status_code, negative.json()["error"]["param"]) == (400, "max_tokens")
    too_large = await post(b" " * 10_000_000)
    assert too_large.status_code == 413
    assert is_openai_error(too_large)
    assert not world.generations.specs


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/streams/no-such-reply-0123456789", 404),
        ("GET", "/v1/streams/short", 404),
        ("GET", "/v1/streams/no-such-reply-0123456789/state", 404),
        ("POST", "/v1/streams/no-such-reply-0123456789/cancel", 404),
    ],
)
async def test_what_is_not_there(world: Served, method: str, path: str, status: int) -> None:
    response = await world.http.request(method, path)
    assert response.status_code == status
    assert is_openai_error(response)
    assert ("allow" in response.headers) == (status == 405)


async def test_models(world: Served) -> None:
    (listed,) = (await world.get("/v1/models")).json()["data"]
    assert listed == (await world.get("/v1/models/scripted")).json()
    assert (listed["id"], listed["object"], listed["created"]) == ("scripted", "model", 1_700_000_000)
    world.router.model = None
    assert (await world.chat()).status_code == 503


async def test_probes(world: Served) -> None:
    assert (await world.get("/livez")).status_code == 200
    ready = await world.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (200, "ok")
    assert ready.json()["workers"] == {"decode": {"configured": 1, "discovered": 0, "unresolved": 0, "up": 1}}
    metrics = await world.get("/metrics")
    assert (metrics.status_code, metrics.headers["content-type"][:10]) == (200, "text/plain")
    assert "<title>Baton</title>" in (await world.get("/")).text
    world.router.is_ready = False
    assert (await world.get("/readyz")).status_code == 503
    world.router.is_ready = True
    world.gateway.draining_since = 0.0
    draining = await world.get("/readyz")
    assert (draining.status_code, draining.json()["status"]) == (503, "draining")


async def test_keys_scope_replies(tmp_path: Path) -> None:
    async with served(tmp_path, keys=("one", "two")) as world:
        mine, theirs = {"authorization": "Bearer one"}, {"x-api-key": "two"}
        assert (await world.chat()).status_code == 401
        assert (await world.get("/v1/models")).status_code == 401
        assert (await world.get("/readyz")).status_code == 200
        posted = await world.http.post("/v1/chat/completions", json=QUESTION, headers=mine)
        path = posted.headers["location"]
        assert (await world.http.get(path, headers=mine)).status_code == 200
        for method, suffix in (("GET", ""), ("GET", "/state"), ("POST", "/cancel")):
            theirs_seen = await world.http.request(method, path + suffix, headers=theirs)
            unknown_path = "/v1/streams/" + "0" * 32 + suffix
            unknown = await world.http.request(method, unknown_path, headers=theirs)
            assert theirs_seen.status_code == unknown.status_code == 404
            assert theirs_seen.content == unknown.content


class DownLog(MemoryEventLog):
    """A log whose store does not answer."""

    async def create(self, *_: Any) -> int:
        raise LogUnavailable("down")

    async def append(self, *_: Any) -> Any:
        raise LogUnavailable("down")

    async def healthy(self) -> bool:
        return False

    meta = state = attach = detach = is_attached = renew = request_cancel = append  # type: ignore[assignment]


async def test_without_a_log_streams_go_on_and_say_that_they_cannot_be_resumed(tmp_path: Path) -> None:
    async with served(tmp_path, log=DownLog("g1")) as world:
        response = await world.streamed()
        assert response.headers["baton-resumable"] == "false"
        events = frames(response.content)
        assert "".join(event.text for event in events) == "Hello world"
        assert all(event.event_id.endswith(".1") for event in events)
        ready = await world.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "degraded")
        elsewhere = await world.get("/v1/streams/" + "0" * 32)
        assert elsewhere.status_code == 503
        assert "retry-after" in elsewhere.headers


async def test_a_gateway_that_requires_the_log_takes_nothing_without_it(tmp_path: Path) -> None:
    async with served(tmp_path, log=DownLog("g1"), require_log=True) as world:
        for _ in range(2):  # the first one may find out
            response = await world.chat(stream=True)
            assert response.status_code == 503
            assert "retry-after" in response.headers
