"""What is recorded once reads the same in Prometheus and in OpenTelemetry, with bounded labels."""

from dataclasses import dataclass

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from observability.metrics import BoundedLabel, WorkerState
from observability.telemetry import Telemetry, build
from observability.timings import HandoffStages, TtftStages

STAGES = TtftStages.from_parts(
    100.0, gateway=5, decode_queue=10, prefill_queue=5, prefill=60, text_hold=10, log_append=2, flush=1
)


@dataclass(frozen=True)
class Load:
    running: int = 2
    waiting: int = 1
    blocks_used: int = 10
    blocks_cached: int = 4
    blocks_total: int = 64
    prompt_tokens_computed: int = 1000
    tokens_recomputed: int = 7


@pytest.fixture
def telemetry() -> Telemetry:
    return build("baton-test", "1")


def samples(telemetry: Telemetry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body, _ = telemetry.metrics.render()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(telemetry: Telemetry, name: str, **labels: str) -> float:
    return samples(telemetry)[name, frozenset(labels.items())]


GEN_AI = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "baton",
    "gen_ai_request_model": "m",
}


def test_ttft_as_a_whole_and_by_stage(telemetry: Telemetry) -> None:
    telemetry.metrics.observe_ttft(STAGES, "m")
    name = "gen_ai_server_time_to_first_token_seconds"
    assert value(telemetry, f"{name}_sum", **GEN_AI) == pytest.approx(0.1)
    assert value(telemetry, f"{name}_bucket", le="0.08", **GEN_AI) == 0
    assert value(telemetry, f"{name}_bucket", le="0.1", **GEN_AI) == 1
    stages = {
        dict(labels)["baton_stage"]: seconds
        for (name, labels), seconds in samples(telemetry).items()
        if name == "baton_ttft_stage_duration_seconds_sum"
    }
    assert sum(stages.values()) == pytest.approx(0.1)
    assert stages["prefill"] == pytest.approx(0.06)
    assert stages["relay"] == pytest.approx(0.007)


def test_gaps_and_the_end_of_a_reply(telemetry: Telemetry) -> None:
    for gap_s in (0.03, 0.03, 2.0):
        telemetry.metrics.observe_itl(gap_s, "m")
    telemetry.metrics.observe_reply(
        outcome="done",
        finish_reason="stop",
        duration_s=1.1,
        prompt_tokens=20,
        completion_tokens=11,
        model="m",
        ttft_s=0.1,
    )
    assert value(telemetry, "baton_inter_token_latency_seconds_count", gen_ai_request_model="m") == 3
    tpot = "gen_ai_server_time_per_output_token_seconds_sum"
    assert value(telemetry, tpot, **GEN_AI) == pytest.approx(0.1)
    duration = "gen_ai_server_request_duration_seconds_count"
    assert value(telemetry, duration, **GEN_AI, baton_outcome="done", baton_finish_reason="stop") == 1
    tokens = {"gen_ai_request_model": "m"}
    assert value(telemetry, "baton_tokens_total", gen_ai_token_type="input", **tokens) == 20
    assert value(telemetry, "baton_tokens_total", gen_ai_token_type="output", **tokens) == 11


def test_the_gateways_counters(telemetry: Telemetry) -> None:
    metrics = telemetry.metrics
    metrics.observe_append(5, 0.001)
    metrics.observe_append(2, 0.002)
    metrics.retry("unavailable")
    metrics.resume("replayed")
    metrics.slow_client()
    metrics.watch_streams(lambda: 17)
    assert value(telemetry, "baton_log_events_total") == 7
    assert value(telemetry, "baton_log_append_duration_seconds_sum") == pytest.approx(0.003)
    assert value(telemetry, "baton_retries_total", baton_reason="unavailable") == 1
    assert value(telemetry, "baton_resumes_total", baton_outcome="replayed") == 1
    assert value(telemetry, "baton_slow_clients_total") == 1
    assert value(telemetry, "baton_streams") == 17


def test_the_workers_metrics(telemetry: Telemetry) -> None:
    metrics = telemetry.metrics
    metrics.prefill_attempt("ok")
    metrics.prefill_attempt("error")
    metrics.kv_transfer(1 << 20, 0.004)
    metrics.observe_handoff(HandoffStages(kv_transfer=4.0, join=1.0, first_step=15.0))
    assert value(telemetry, "baton_prefill_attempts_total", baton_outcome="ok") == 1
    assert value(telemetry, "baton_kv_transfer_size_bytes_total") == 1 << 20
    assert value(telemetry, "baton_kv_transfer_duration_seconds_sum") == pytest.approx(0.004)
    assert value(telemetry, "baton_handoff_duration_seconds_sum") == pytest.approx(0.02)
    stage = "baton_handoff_stage_duration_seconds_sum"
    assert value(telemetry, stage, baton_stage="kv_transfer") == pytest.approx(0.004)


def test_picks_by_how_they_came_about(telemetry: Telemetry) -> None:
    for outcome in ("affinity", "affinity", "overflow"):
        telemetry.metrics.pick("decode", outcome)
    telemetry.metrics.pick("prefill", "least_loaded")
    name = "baton_routing_picks_total"
    assert value(telemetry, name, baton_role="decode", baton_outcome="affinity") == 2
    assert value(telemetry, name, baton_role="decode", baton_outcome="overflow") == 1
    assert value(telemetry, name, baton_role="prefill", baton_outcome="least_loaded") == 1


def workers_shown(telemetry: Telemetry) -> dict[tuple[str, str, str], float]:
    return {
        (dict(labels)["baton_role"], dict(labels)["baton_state"], dict(labels)["baton_breaker"]): number
        for (name, labels), number in samples(telemetry).items()
        if name == "baton_routing_workers"
    }


def test_workers_that_are_known_now_are_counted(telemetry: Telemetry) -> None:
    workers = [
        WorkerState("decode", "10.0.0.1:1", "up", "closed"),
        WorkerState("decode", "10.0.0.2:1", "up", "open"),
        WorkerState("decode", "10.0.0.3:1", "up", "closed"),
        WorkerState("decode", "10.0.0.4:1", "down", "half-open"),
        WorkerState("prefill", "10.0.0.5:1", "draining", "closed"),
    ]
    telemetry.metrics.watch_workers(lambda: workers)
    assert workers_shown(telemetry) == {
        ("decode", "up", "closed"): 2,
        ("decode", "up", "open"): 1,
        ("decode", "down", "half-open"): 1,
        ("prefill", "draining", "closed"): 1,
    }
    del workers[1:]
    assert workers_shown(telemetry) == {("decode", "up", "closed"): 1}


def test_however_many_addresses_come_and_go_none_is_shown_and_all_are_counted(telemetry: Telemetry) -> None:
    """The SDK takes 2,000 label sets in a gauge's life; beyond, it would show nothing useful."""
    workers: list[WorkerState] = []
    telemetry.metrics.watch_workers(lambda: workers)
    for start in range(0, 3000, 1000):
        workers[:] = [WorkerState("decode", f"pod-{start + n}:1", "up", "closed") for n in range(1000)]
        assert workers_shown(telemetry) == {("decode", "up", "closed"): 1000}
        assert b"pod-" not in telemetry.metrics.render()[0]


def test_the_load_is_read_at_each_scrape(telemetry: Telemetry) -> None:
    loads = [Load()]
    telemetry.metrics.watch_load(lambda: loads[-1])
    assert value(telemetry, "baton_engine_running") == 2
    assert value(telemetry, "baton_engine_blocks_limit") == 64
    assert value(telemetry, "baton_engine_prompt_tokens_computed_total") == 1000
    loads.append(Load(running=5, prompt_tokens_computed=1500))
    assert value(telemetry, "baton_engine_running") == 5
    assert value(telemetry, "baton_engine_prompt_tokens_computed_total") == 1500


def test_a_label_takes_no_more_than_its_limit() -> None:
    bounded = BoundedLabel(limit=2)
    assert [bounded(value) for value in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_one_model_too_many_reads_other(telemetry: Telemetry) -> None:
    for i in range(1000):
        telemetry.metrics.observe_itl(0.01, f"model-{i}")
    counts = {
        dict(labels)["gen_ai_request_model"]: count
        for (name, labels), count in samples(telemetry).items()
        if name == "baton_inter_token_latency_seconds_count"
    }
    assert len(counts) == 33
    assert counts["other"] == 1000 - 32


def test_openmetrics_carries_exemplars_with_the_trace(telemetry: Telemetry) -> None:
    with telemetry.tracer.start_as_current_span("reply") as span:
        telemetry.metrics.observe_ttft(STAGES, "m")
    body, content_type = telemetry.metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert f'trace_id="{span.get_span_context().trace_id:032x}"' in body.decode()
    assert body.endswith(b"# EOF\n")


def test_without_an_accept_header_the_classic_format(telemetry: Telemetry) -> None:
    telemetry.metrics.slow_client()
    body, content_type = telemetry.metrics.render()
    assert content_type.startswith("text/plain")
    assert b"baton_slow_clients_total 1.0" in body


def test_two_processes_share_no_registry() -> None:
    first, second = build("a", "1"), build("b", "1")
    first.metrics.slow_client()
    assert samples(second) == {}


def test_otlp_readers_see_the_same_numbers() -> None:
    reader = InMemoryMetricReader()
    telemetry = build("baton-test", "1", metric_reader=reader)
    telemetry.metrics.observe_append(3, 0.5)
    metrics = reader.get_metrics_data()
    assert metrics is not None
    named = {m.name: m for m in metrics.resource_metrics[0].scope_metrics[0].metrics}
    assert named["baton.log.events"].data.data_points[0].value == 3  # type: ignore[union-attr]
    assert named["baton.log.append.duration"].unit == "s"
    assert value(telemetry, "baton_log_events_total") == 3
