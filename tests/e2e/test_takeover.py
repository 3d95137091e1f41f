"""A gateway dies with streams open: another one goes on with its replies, and nobody misses a word."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.sse_client import Frame, RawStream, resume, stream_chat
from tests.e2e.stack import Stack, running_stack
from tests.waiting import eventually_sync

pytestmark = pytest.mark.slow

# Some three seconds long, which is more than a lease and the look at it.
REPLY = {"temperature": 1.0, "seed": 5, "max_tokens": 90, "ignore_eos": True}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    flags = ("--engine", "sim", "--sim-token-ms", "30", "--sim-jitter-ms", "5")
    settings = {"lease_s": "0.7", "local_prefill": "never", "drain_s": "1"}
    with running_stack(tmp_path, *flags, gateways=2, **settings) as stack:
        yield stack


def undisturbed_text(stack: Stack) -> str:
    with stream_chat(stack.port + 1, **REPLY) as stream:
        return "".join(frame.text for frame in stream.read_all())


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_resumed_reply_goes_on_at_another_gateway(stack: Stack, signum: signal.Signals) -> None:
    expected = undisturbed_text(stack)
    with stream_chat(stack.port, **REPLY) as stream:
        before = stream.read_frames(12)
        stack.kill("gateway-0", signum)
        if signum is signal.SIGTERM:  # the drain lets it run on for a moment, then drops the connection
            before = stream.read_all()
            assert before[-1].data != "[DONE]"
    with resume(stack.port + 1, before[-1].event_id) as rest:
        assert rest.status == 200
        after = rest.read_all()
        assert rest.complete
    assert after[-1].data == "[DONE]"
    assert "".join(frame.text for frame in before + after) == expected
    numbers = [int(frame.event_id.rpartition(":")[2].partition(".")[0]) for frame in before + after]
    assert numbers == sorted(set(numbers))
    eventually_sync(lambda: stack.blocks_used() == {"prefill-0": 0, "decode-0": 0}, timeout=10)
    reply_id = before[0].event_id.partition(":")[0]
    state = httpx.get(f"http://127.0.0.1:{stack.port + 1}/v1/streams/{reply_id}/state").json()
    assert (state["status"], state["text"], state["owner_epoch"]) == ("done", expected, 2)
    if signum is signal.SIGSTOP:
        stack.kill("gateway-0", signal.SIGCONT)
        # The old owner wakes with its client gone: it may add nothing to the log.
        with RawStream(stack.port + 1, "GET", f"/v1/streams/{reply_id}") as replay:
            assert "".join(frame.text for frame in replay.read_all()) == expected
            assert replay.body.count(b"[DONE]") == 1


def test_a_follower_elsewhere_sees_a_pause_and_then_the_rest(stack: Stack) -> None:
    expected = undisturbed_text(stack)
    with stream_chat(stack.port, **REPLY) as stream:
        reply_id = stream.read_frames(3)[0].event_id.partition(":")[0]
        with RawStream(stack.port + 1, "GET", f"/v1/streams/{reply_id}") as follower:
            follower.read_frames(6)
            stack.kill("gateway-0", signal.SIGKILL)
            events = follower.read_all()
            assert follower.complete
    assert "".join(frame.text for frame in events) == expected
    assert [frame.data for frame in events].count("[DONE]") == 1


def test_a_reply_with_several_choices_is_taken_over_whole(stack: Stack) -> None:
    options = REPLY | {"n": 2, "stream_options": {"include_usage": True}}
    with stream_chat(stack.port + 1, **options) as stream:
        whole = stream.read_all()
    with stream_chat(stack.port, **options) as stream:
        before = stream.read_frames(20)
        stack.kill("gateway-0", signal.SIGKILL)
    with resume(stack.port + 1, before[-1].event_id) as rest:
        after = rest.read_all()

    def texts(events: list[Frame]) -> dict[int, str]:
        joined: dict[int, str] = {}
        for frame in events:
            for choice in frame.choices:
                text = choice["delta"].get("content") or ""
                joined[choice["index"]] = joined.get(choice["index"], "") + text
        return joined

    assert texts(before + after) == texts(whole)
    assert _counts(after[-2].usage) == _counts(whole[-2].usage)


def _counts(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Without what the prefix cache held, which depends on what was asked before."""
    assert usage is not None
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
