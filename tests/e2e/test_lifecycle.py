"""What happens when clients leave, cancel or ask for workers that are not there."""

import signal
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from cli.processes import start_ticks
from tests.e2e.sse_client import stream_chat
from tests.e2e.stack import Stack, running_stack
from tests.waiting import eventually_sync

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 4000, "temperature": 1.0, "seed": 3, "ignore_eos": True}
IDLE = {"prefill-0": 0, "decode-0": 0}


@pytest.fixture(scope="module")
def slow_stack(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Slow enough that nothing ends by itself; a grace period and keepalives that tests can wait for."""
    flags = ("--engine", "sim", "--sim-token-ms", "20", "--sim-prefill-ms-per-token", "20")
    settings = {"resume_grace_s": "0.5", "keepalive_s": "0.05", "local_prefill": "never"}
    with running_stack(tmp_path_factory.mktemp("slow"), *flags, **settings) as stack:
        yield stack


def test_a_client_that_leaves_stops_the_generation_after_the_grace_period(slow_stack: Stack) -> None:
    with stream_chat(slow_stack.port, **LONG) as stream:
        first = stream.read_frames(3)
        assert sum(slow_stack.blocks_used().values()) > 0
    eventually_sync(lambda: slow_stack.blocks_used() == IDLE, timeout=20)
    reply_id = first[0].event_id.partition(":")[0]
    state = httpx.get(f"{slow_stack.url}/v1/streams/{reply_id}/state").json()
    assert state["status"] == "abandoned"


def test_a_client_that_leaves_during_prefill_stops_that_too(slow_stack: Stack) -> None:
    long_prompt = [{"role": "user", "content": "baton " * 400}]
    with stream_chat(slow_stack.port, messages=long_prompt, **LONG):
        eventually_sync(lambda: slow_stack.blocks_used()["prefill-0"] > 0, timeout=10)
    eventually_sync(lambda: slow_stack.blocks_used() == IDLE, timeout=20)


def test_cancel_ends_the_stream_and_frees_the_blocks(slow_stack: Stack) -> None:
    with stream_chat(slow_stack.port, **LONG) as stream:
        reply_id = stream.read_frames(3)[0].event_id.partition(":")[0]
        for _ in range(2):  # idempotent
            assert httpx.post(f"{slow_stack.url}/v1/streams/{reply_id}/cancel").status_code == 200
        events = stream.read_all()
        assert stream.complete
    assert events[-1].data == "[DONE]"
    assert '"finish_reason":"stop"' in "".join(event.data for event in events).replace(" ", "")
    assert '"baton_finish_reason":"cancelled"' in "".join(event.data for event in events).replace(" ", "")
    eventually_sync(lambda: slow_stack.blocks_used() == IDLE, timeout=10)


def test_the_openai_client_gets_through_keepalives_during_a_long_prefill(slow_stack: Stack) -> None:
    """50 ms keepalives; the prompt's simulated prefill takes over a second."""
    client = OpenAI(base_url=f"{slow_stack.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Tell me about relay races, please. " * 2}]
    options = {"model": client.models.list().data[0].id, "max_tokens": 12, "seed": 5}
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(messages=messages, **options)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    # The second one found in the prefix cache what the first had computed.
    assert whole.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    details = {"prompt_tokens_details"}
    assert chunks[-1].usage.model_dump(exclude=details) == whole.usage.model_dump(exclude=details)
    assert whole.usage.prompt_tokens * 20 >= 1000, "the prefill was too short to prove anything"
    assert whole.usage.completion_tokens == 12
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_keepalives_really_flow_during_the_prefill(slow_stack: Stack) -> None:
    with stream_chat(
        slow_stack.port, max_tokens=2, messages=[{"role": "user", "content": "hello " * 20}]
    ) as stream:
        stream.read_all()
        assert stream.body.count(b": keep-alive\n") >= 5


def test_no_worker_is_a_503_with_retry_after(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--engine", "sim") as stack:
        for name in ("decode-0", "prefill-0"):
            stack.kill(name, signal.SIGKILL)
        eventually_sync(lambda: httpx.get(f"{stack.url}/readyz").status_code == 503, timeout=10)
        body = {"model": "baton-sim", "messages": [{"role": "user", "content": "hi"}]}
        response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=5)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["message"]


def test_a_killed_prefill_worker_is_replaced_by_the_decode_worker(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--engine", "sim") as stack:
        stack.kill("prefill-0", signal.SIGKILL)
        with stream_chat(stack.port, max_tokens=10) as stream:
            assert stream.read_all()[-1].data == "[DONE]"


def test_down_ends_every_process_and_says_nothing_twice(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--engine", "sim") as stack:
        pids = [row["pid"] for row in stack.status()]
        assert len(pids) >= 4
        stack.baton("down")
        assert not [pid for pid in pids if start_ticks(pid) is not None]
        assert stack.baton("down", check=False).returncode == 0
