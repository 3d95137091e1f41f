"""OpenTelemetry's metrics as Prometheus sees them.

A collector for prometheus_client that reads the SDK at every scrape, so nothing is recorded twice.
Names change as the OpenTelemetry specification says: dots to underscores, the unit as a suffix,
`_total` for counters. Must not know: which metrics there are.
"""

from collections.abc import Iterator, Mapping, Sequence

from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import Histogram as SdkHistogram
from opentelemetry.sdk.metrics.export import (
    HistogramDataPoint,
    InMemoryMetricReader,
    NumberDataPoint,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

_UNITS = {"s": "seconds", "By": "bytes"}


class PrometheusView(Collector):
    """Presents a reader's metrics to a prometheus_client registry."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        self._reader = reader

    def collect(self) -> Iterator[Metric]:
        """One family per instrument, read now."""
        metrics = self._reader.get_metrics_data()
        if metrics is None:
            return
        for resource in metrics.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    yield _family(metric)


def _family(metric: SdkMetric) -> Metric:
    unit = _UNITS.get(metric.unit or "", "")
    name = prometheus_name(metric.name, unit)
    description = metric.description or ""
    points: Sequence[NumberDataPoint | HistogramDataPoint] = metric.data.data_points  # type: ignore[assignment]
    label_names = sorted({key for point in points for key in (point.attributes or {})})
    labels = [key.replace(".", "_") for key in label_names]
    family: HistogramMetricFamily | CounterMetricFamily | GaugeMetricFamily
    if isinstance(metric.data, SdkHistogram):
        family = HistogramMetricFamily(name, description, labels=labels, unit=unit)
    elif isinstance(metric.data, Sum) and metric.data.is_monotonic:
        family = CounterMetricFamily(name, description, labels=labels, unit=unit)
    else:
        family = GaugeMetricFamily(name, description, labels=labels, unit=unit)
    for point in points:
        values = _label_values(label_names, point.attributes or {})
        if isinstance(point, HistogramDataPoint):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(values, _buckets(point), point.sum)
        else:
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(values, point.value)
    return family


def prometheus_name(name: str, unit: str) -> str:
    """`baton.kv.transfer.duration` and seconds become `baton_kv_transfer_duration_seconds`."""
    name = name.replace(".", "_")
    return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"


def _label_values(names: Sequence[str], attributes: Mapping[str, object]) -> list[str]:
    return [str(attributes.get(name, "")) for name in names]


def _buckets(point: HistogramDataPoint) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """The point's buckets, cumulative as Prometheus counts them, each with its latest exemplar."""
    bounds = [*point.explicit_bounds, float("inf")]
    exemplars: dict[float, Exemplar] = {}
    for exemplar in point.exemplars:
        bound = next(bound for bound in bounds if exemplar.value <= bound)
        exemplars[bound] = _exemplar(exemplar)
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    total = 0
    for bound, count in zip(bounds, point.bucket_counts, strict=True):
        total += count
        le = floatToGoString(bound)  # type: ignore[no-untyped-call]
        if bound in exemplars:
            buckets.append((le, total, exemplars[bound]))
        else:
            buckets.append((le, total))
    return buckets


def _exemplar(exemplar: SdkExemplar) -> Exemplar:
    labels = {}
    if exemplar.trace_id and exemplar.span_id:
        labels = {
            "trace_id": format_trace_id(exemplar.trace_id),
            "span_id": format_span_id(exemplar.span_id),
        }
    return Exemplar(labels, exemplar.value, exemplar.time_unix_nano / 1e9)
