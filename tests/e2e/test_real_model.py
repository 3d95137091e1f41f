"""The real model behind the real gateway: streamed equals buffered, and the first token's time adds up."""

import time
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.e2e.otlp_collector import running_collector
from tests.e2e.sse_client import stream_chat
from tests.e2e.stack import Stack, running_stack
from tests.waiting import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "Describe a relay race, please. " * 20}]
STAGES = ("gateway", "decode_queue", "prefill_queue", "prefill", "text_hold", "log_append", "flush")


def test_streamed_and_buffered_text_are_equal_for_a_seed(real_stack: Stack) -> None:
    client = OpenAI(base_url=f"{real_stack.url}/v1", api_key="none", max_retries=0)
    options = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Tell me a story about two runners. 🏃"}],
        "max_tokens": 40,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 1234,
    }
    streams = [client.chat.completions.create(stream=True, **options) for _ in range(3)]
    streamed = ["".join(c.choices[0].delta.content or "" for c in stream) for stream in streams]
    buffered = client.chat.completions.create(**options).choices[0].message.content
    assert streamed == [buffered] * 3
    other = client.chat.completions.create(**{**options, "seed": 1235}).choices[0].message.content
    assert other != buffered


def test_one_trace_from_gateway_to_prefill_and_a_ttft_that_adds_up(
    tmp_path: Path, model_folder: Path
) -> None:
    with running_collector() as collector:
        flags = ("--model", str(model_folder))
        with running_stack(tmp_path, *flags, otlp_endpoint=f"http://{collector.address}") as stack:
            model = httpx.get(f"{stack.url}/v1/models").json()["data"][0]["id"]
            for attempt in range(3):  # the first one warms up
                started = time.monotonic()
                # A prompt of its own, or the prefix cache would leave no prefill to speak of.
                question = [{"role": "user", "content": f"{attempt + 1}. {QUESTION[0]['content']}"}]
                with stream_chat(
                    stack.port, model=model, messages=question, max_tokens=8, seed=attempt
                ) as stream:
                    stream.read_to_text()
                    measured_ms = (time.monotonic() - started) * 1000
                    reply_id = stream.read_all()[0].event_id.partition(":")[0]
            timings = httpx.get(f"{stack.url}/v1/streams/{reply_id}/state").json()["timings"]
            eventually_sync(lambda: len(collector.named("baton.v1.Prefill/Prefill")) >= 6, timeout=20)
        stages_ms = sum(timings[stage] for stage in STAGES)
        # Every stage is measured where it happens; what is left is the hops between processes.
        assert abs(measured_ms - stages_ms) <= max(2.0, 0.05 * measured_ms), (measured_ms, timings)
        assert all(timings[stage] >= 0 for stage in STAGES)
        eventually_sync(lambda: len(collector.named("POST /v1/chat/completions")) == 3, timeout=20)
        for root in collector.named("POST /v1/chat/completions"):
            check_tree(collector, root.trace_id)


def check_tree(collector, trace_id: bytes) -> None:  # type: ignore[no-untyped-def]
    """gateway SERVER > chat {model} > Decode (client, server) > Prefill (client, server)."""
    spans = {span.span_id: (service, span) for service, span in collector.spans if span.trace_id == trace_id}
    prefill = next(
        s for service, s in spans.values() if service == "baton-prefill" and "Prefill/Prefill" in s.name
    )
    path = []
    span = prefill
    while span.parent_span_id:
        span = spans[span.parent_span_id][1]
        path.append(span.name)
    assert path[-1] == "POST /v1/chat/completions"
    assert path[-2].startswith("chat ")
    assert path.count("baton.v1.Decode/Generate") == 2
    names = {s.name for _, s in spans.values()}
    assert {"queue", "prefill", "kv_transfer", "decode"} <= names
