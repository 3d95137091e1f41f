"""A stream cut anywhere and resumed joins to exactly the undisturbed one, over real sockets."""

import random

import httpx
import pytest

from tests.e2e.sse_client import Frame, RawStream, frames, resume, stream_chat
from tests.e2e.stack import Stack

pytestmark = pytest.mark.slow

REPLY = {"temperature": 1.0, "seed": 11, "max_tokens": 40}


def text_of(events: list[Frame]) -> str:
    return "".join(frame.text for frame in events)


def replay(port: int, reply_id: str, after: int = 0) -> RawStream:
    return RawStream(
        port,
        "GET",
        f"/v1/streams/{reply_id}?after={reply_id}:{after}" if after else f"/v1/streams/{reply_id}",
    )


def whole_stream(port: int) -> tuple[list[Frame], bytes]:
    with stream_chat(port, **REPLY) as stream:
        assert stream.status == 200
        events = stream.read_all()
        assert stream.complete
        return events, stream.body


def test_a_reply_ends_with_done_and_its_text_is_the_buffered_one(sim_stack: Stack) -> None:
    events, _ = whole_stream(sim_stack.port)
    assert events[-1].data == "[DONE]"
    buffered = httpx.post(
        f"{sim_stack.url}/v1/chat/completions",
        json={
            "model": "baton-sim",
            "messages": [{"role": "user", "content": "Tell me about relay races."}],
            **REPLY,
        },
        timeout=60,
    ).json()
    assert buffered["choices"][0]["message"]["content"] == text_of(events) != ""
    assert buffered["usage"]["completion_tokens"] == 40


def test_cut_after_every_event_while_it_is_generated(sim_stack: Stack) -> None:
    undisturbed, _ = whole_stream(sim_stack.port)
    for cut in range(1, len(undisturbed)):
        with stream_chat(sim_stack.port, **REPLY) as stream:
            before = stream.read_frames(cut)
        assert len(before) == cut
        with resume(sim_stack.port, before[-1].event_id) as rest:
            assert rest.status == 200
            after = rest.read_all()
            assert rest.complete
        assert text_of(before) + text_of(after) == text_of(undisturbed)
        assert len(before) + len(after) == len(undisturbed), f"gap or repeat after event {cut}"
        assert after[-1].data == "[DONE]"


def test_cut_at_random_byte_offsets(sim_stack: Stack) -> None:
    undisturbed, _ = whole_stream(sim_stack.port)
    with stream_chat(sim_stack.port, **REPLY) as stream:
        reply_id = stream.read_all()[0].event_id.partition(":")[0]
    with replay(sim_stack.port, reply_id) as full:
        full.read_all()
        body = full.body
    assert text_of(frames(body)) == text_of(undisturbed)
    choose = random.Random(20260)
    for _ in range(200):
        offset = choose.randrange(len(body))
        with replay(sim_stack.port, reply_id) as stream:
            seen = stream.read_bytes(offset)
        before = frames(seen)
        rest = resume(sim_stack.port, before[-1].event_id) if before else replay(sim_stack.port, reply_id)
        with rest:
            if rest.status == 204:  # the cut fell behind the terminal event
                assert before[-1].data == "[DONE]"
                after = []
            else:
                after = rest.read_all()
        assert [f.raw for f in before + after] == [f.raw for f in frames(body)], f"cut at byte {offset}"


def test_resume_on_another_gateway_in_mid_stream(sim_stack: Stack) -> None:
    undisturbed, _ = whole_stream(sim_stack.port)
    with stream_chat(sim_stack.port, **REPLY) as stream:
        before = stream.read_frames(9)
    with resume(sim_stack.port + 1, before[-1].event_id) as rest:
        after = rest.read_all()
        assert rest.complete
    assert text_of(before) + text_of(after) == text_of(undisturbed)


def test_a_repost_with_last_event_id_resumes_and_starts_nothing(sim_stack: Stack) -> None:
    undisturbed, _ = whole_stream(sim_stack.port)
    with stream_chat(sim_stack.port, **REPLY) as stream:
        before = stream.read_frames(5)
    with RawStream(
        sim_stack.port,
        "POST",
        "/v1/chat/completions",
        {"messages": "ignored", "stream": True},
        Last_Event_ID=before[-1].event_id,
    ) as rest:
        assert rest.status == 200
        after = rest.read_all()
    assert text_of(before) + text_of(after) == text_of(undisturbed)
    assert {f.event_id.partition(":")[0] for f in after} == {before[0].event_id.partition(":")[0]}


def test_resume_statuses(sim_stack: Stack) -> None:
    events, _ = whole_stream(sim_stack.port)
    reply_id, _, last = events[-1].event_id.partition(":")

    def status(path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{sim_stack.url}/v1/streams/{path}", headers=headers, timeout=10)

    assert status(reply_id, **{"Last-Event-ID": events[-1].event_id}).status_code == 204
    assert status(reply_id, **{"Last-Event-ID": "nonsense"}).status_code == 400
    assert status(reply_id, **{"Last-Event-ID": f"{reply_id}:-1"}).status_code == 400
    ahead = status(reply_id, **{"Last-Event-ID": f"{reply_id}:{int(last) + 1}"})
    assert ahead.status_code == 409
    assert ahead.headers["x-should-retry"] == "false"
    assert status("no-such-reply-0123456789").status_code == 404
    for response in (ahead, status("no-such-reply-0123456789")):
        assert response.json()["error"]["message"]
