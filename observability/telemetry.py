"""A process's telemetry: one tracer, one set of metrics, one way to end them.

Nothing is global: whoever records is handed a `Telemetry`. Invariant: a collector that is down, slow
or absent costs nothing but its own data; spans queue in bounded memory and are dropped, shutdown gives
up after two seconds. Must not know: what is recorded.
"""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from observability.metrics import Metrics

_SCOPE = "baton"
_FLUSH_S = 1.5  # for a collector that answers
_GIVE_UP_S = 0.5  # for the exporters' threads to notice that they were closed


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a process records with."""

    tracer: Tracer
    metrics: Metrics
    _close: Callable[[], None]
    _abandon: Callable[[], None]

    def shutdown(self) -> None:
        """Sends what is left, within two seconds; later spans and values are dropped. May be repeated."""
        closing = threading.Thread(target=self._close, name="telemetry-shutdown", daemon=True)
        closing.start()
        closing.join(_FLUSH_S)
        if closing.is_alive():
            # The SDK's own timeout is 30 s; closing an exporter ends its retries and its call.
            self._abandon()
            closing.join(_GIVE_UP_S)


def setup(service_name: str, instance: str) -> Telemetry:
    """Telemetry as the environment asks for.

    Exports by OTLP over gRPC if `BATON_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` is set, else
    nowhere; the metrics can be rendered for Prometheus either way. The other `OTEL_*` variables
    (headers, sampler, intervals, resource attributes, service name) mean what they always do.

    Args:
        service_name: `service.name` unless the environment names another.
        instance: `service.instance.id`, what tells this process from its siblings.
    """
    endpoint = _endpoint()
    if endpoint is None:
        return build(service_name, instance)
    spans = OTLPSpanExporter(endpoint=endpoint)
    metrics = OTLPMetricExporter(endpoint=endpoint)

    def abandon() -> None:
        spans.shutdown()
        metrics.shutdown()

    return _assemble(
        _resource(service_name, instance),
        [BatchSpanProcessor(spans)],
        [PeriodicExportingMetricReader(metrics)],
        abandon,
    )


def build(
    service_name: str,
    instance: str,
    *,
    span_exporter: SpanExporter | None = None,
    metric_reader: MetricReader | None = None,
) -> Telemetry:
    """Telemetry from given parts, whatever the environment says.

    Args:
        span_exporter: gets each span the moment it ends, in the thread that ends it; for tests.
        metric_reader: reads the metrics beside Prometheus.
    """
    processors = [] if span_exporter is None else [SimpleSpanProcessor(span_exporter)]
    readers = [] if metric_reader is None else [metric_reader]
    return _assemble(_resource(service_name, instance), processors, readers, lambda: None)


def _assemble(
    resource: Resource,
    processors: Sequence[SpanProcessor],
    readers: Sequence[MetricReader],
    abandon: Callable[[], None],
) -> Telemetry:
    # No exit handlers: they would wait 30 s for a collector that is gone.
    tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
    for processor in processors:
        tracers.add_span_processor(processor)
    scraped = InMemoryMetricReader()
    meters = MeterProvider([scraped, *readers], resource, shutdown_on_exit=False)
    closed = threading.Lock()

    def close() -> None:
        if closed.acquire(blocking=False):
            tracers.shutdown()
            meters.shutdown()

    return Telemetry(tracers.get_tracer(_SCOPE), Metrics(meters.get_meter(_SCOPE), scraped), close, abandon)


def _resource(service_name: str, instance: str) -> Resource:
    ours = Resource.create({"service.name": service_name, "service.instance.id": instance})
    # The SDK lets code win over the environment; an operator's word should.
    return ours.merge(OTELResourceDetector().detect())


def _endpoint() -> str | None:
    endpoint = os.environ.get("BATON_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint:
        return None
    # A bare host:port would be taken for TLS.
    return endpoint if "://" in endpoint else f"http://{endpoint}"
