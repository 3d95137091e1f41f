"""Telemetry is what the environment asks for, and a collector that is gone costs nothing."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from observability.telemetry import build
from tests.e2e.otlp_collector import running_collector
from tests.waiting import eventually_sync

RECORD = """
import sys, time
from observability.telemetry import setup
telemetry = setup("baton-decode", "127.0.0.1:1")
begun = time.monotonic()
for _ in range(5000):
    with telemetry.tracer.start_as_current_span("step"):
        telemetry.metrics.observe_append(1, 0.001)
recorded = time.monotonic()
telemetry.shutdown()
telemetry.shutdown()
print(recorded - begun, time.monotonic() - recorded)
"""


def record(**environment: str) -> tuple[float, float]:
    """Records spans in a process of its own; returns the seconds for recording and for shutdown."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "BATON_"))}
    finished = subprocess.run(
        [sys.executable, "-c", RECORD],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    recording, shutdown = map(float, finished.stdout.split())
    return recording, shutdown


@contextmanager
def silent_listener() -> Iterator[str]:
    """A port that accepts connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("variable", ["BATON_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
@pytest.mark.parametrize("scheme", ["http://", ""])
def test_spans_reach_the_collector_under_the_services_name(variable: str, scheme: str) -> None:
    if not scheme and variable.startswith("OTEL"):
        scheme = "http://"
    with running_collector() as collector:
        record(**{variable: scheme + collector.address, "OTEL_BSP_SCHEDULE_DELAY": "100"})
        eventually_sync(lambda: len(collector.spans) > 1000)
    assert {service for service, _ in collector.spans} == {"baton-decode"}


def test_the_environment_names_the_service() -> None:
    with running_collector() as collector:
        record(
            BATON_OTLP_ENDPOINT=f"http://{collector.address}",
            OTEL_SERVICE_NAME="eu-decode",
            OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
        )
        eventually_sync(lambda: bool(collector.spans))
    assert {service for service, _ in collector.spans} == {"eu-decode"}


def test_a_collector_that_is_down_slows_nothing() -> None:
    recording, shutdown = record(BATON_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert recording < 2.0
    assert shutdown < 2.5


def test_a_collector_that_never_answers_slows_nothing() -> None:
    with silent_listener() as address:
        begun = time.monotonic()
        recording, shutdown = record(BATON_OTLP_ENDPOINT=f"http://{address}")
        whole = time.monotonic() - begun
    assert recording < 2.0
    assert shutdown < 2.5
    # Nor does the interpreter wait for the exporters' threads afterwards.
    assert whole < 15.0


def test_nothing_is_exported_unasked() -> None:
    assert record()[1] < 0.5


def test_resource_attributes() -> None:
    exporter = InMemorySpanExporter()
    telemetry = build("baton-gateway", "127.0.0.1:8000", span_exporter=exporter)
    with telemetry.tracer.start_as_current_span("a"):
        pass
    (span,) = exporter.get_finished_spans()
    assert span.resource.attributes["service.instance.id"] == "127.0.0.1:8000"


def test_nothing_global_is_touched() -> None:
    before = trace.get_tracer_provider(), metrics.get_meter_provider()
    build("baton-gateway", "1")
    assert (trace.get_tracer_provider(), metrics.get_meter_provider()) == before


def test_spans_after_shutdown_are_dropped() -> None:
    exporter = InMemorySpanExporter()
    telemetry = build("baton-gateway", "1", span_exporter=exporter)
    telemetry.shutdown()
    telemetry.shutdown()
    with telemetry.tracer.start_as_current_span("late"):
        telemetry.metrics.slow_client()
    assert exporter.get_finished_spans() == ()
