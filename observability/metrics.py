"""Every metric of the project, recorded once and read twice: by OTLP and by Prometheus.

Invariant: the label sets are bounded. Callers pass only what the project itself names (outcomes,
reasons, the models it serves), never what a client sent; past a fixed number of distinct values a
label reads `other`. No label holds an address: they change as pods do, without end, and whoever may scrape
need not know them. Must not know: services or the gateway; loads come in through a protocol.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from observability import semconv
from observability.prometheus import PrometheusView
from observability.timings import HandoffStages, TtftStages

_MAX_LABEL_VALUES = 32


class LoadLike(Protocol):
    """A snapshot of an engine's load. Blocks in blocks; the counters run from the engine's start."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def blocks_cached(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def prompt_tokens_computed(self) -> int: ...
    @property
    def tokens_recomputed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as a gateway sees it now."""

    role: str
    address: str
    state: str  # up, draining, down, other_model
    breaker: str  # closed, half-open, open


class BoundedLabel:
    """Passes the first values on and calls every later one `other`."""

    def __init__(self, limit: int = _MAX_LABEL_VALUES) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return "other"
        self._seen.add(value)
        return value


class Metrics:
    """Records what happens. Methods are named after events, not after instruments.

    Args:
        meter: makes the instruments.
        reader: reads them again for `render`; of the same provider as `meter`.
    """

    def __init__(self, meter: Meter, reader: InMemoryMetricReader) -> None:
        self._meter = meter
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(PrometheusView(reader))
        self._model, self._outcome, self._finish, self._reason = (BoundedLabel() for _ in range(4))

        def seconds(name: str, description: str, buckets: Iterable[float]) -> Histogram:
            return meter.create_histogram(
                name, semconv.SECONDS, description, explicit_bucket_boundaries_advisory=list(buckets)
            )

        stages = semconv.STAGE_BUCKETS
        self._ttft = seconds(
            semconv.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
            "Request arrival to first text byte handed to the socket.",
            semconv.TIME_TO_FIRST_TOKEN_BUCKETS,
        )
        self._ttft_stage = seconds(
            semconv.TTFT_STAGE_DURATION, "The time to first token by stage; the stages add up to it.", stages
        )
        self._itl = seconds(
            semconv.INTER_TOKEN_LATENCY,
            "Every single gap between two deltas of a reply.",
            semconv.INTER_TOKEN_LATENCY_BUCKETS,
        )
        self._tpot = seconds(
            semconv.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
            "(total - time to first token) / (n - 1), one mean a reply.",
            semconv.TIME_PER_OUTPUT_TOKEN_BUCKETS,
        )
        self._duration = seconds(
            semconv.GEN_AI_SERVER_REQUEST_DURATION,
            "Request arrival to the reply's terminal event.",
            semconv.REQUEST_DURATION_BUCKETS,
        )
        self._handoff = seconds(
            semconv.HANDOFF_DURATION, "First to second token after a handoff, the handoff gap.", stages
        )
        self._handoff_stage = seconds(semconv.HANDOFF_STAGE_DURATION, "The handoff gap by stage.", stages)
        self._kv_duration = seconds(
            semconv.KV_TRANSFER_DURATION, "First token in hand to last page verified.", stages
        )
        self._append = seconds(
            semconv.LOG_APPEND_DURATION, "One group commit to the event log, round trip.", stages
        )
        counter = meter.create_counter
        self._tokens = counter(semconv.TOKENS, "", "Tokens of finished replies.")
        self._kv_bytes = counter(
            semconv.KV_TRANSFER_BYTES, semconv.BYTES, "KV cache taken over from prefill workers."
        )
        self._attempts = counter(semconv.PREFILL_ATTEMPTS, "", "Calls to prefill workers, by outcome.")
        self._events = counter(semconv.LOG_APPENDED_EVENTS, "", "Events appended to the log.")
        self._retries = counter(
            semconv.RETRIES, "", "Calls to decode workers that broke off in mid-reply, by reason."
        )
        self._resumes = counter(semconv.RESUMES, "", "Clients that came back for a reply, by outcome.")
        self._picks = counter(
            semconv.ROUTING_PICKS, "", "Workers picked, by how: affinity, overflow, least_loaded."
        )
        self._slow = counter(semconv.SLOW_CLIENTS, "", "Connections closed because they did not read.")

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition for Prometheus as (body, content type).

        Args:
            accept: the scraper's Accept header; exemplars with trace IDs go only to those that ask
                for OpenMetrics, the other format has no room for them.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    # --- replies

    def observe_ttft(self, stages: TtftStages, model: str) -> None:
        """Records a reply's time to first token, as a whole and by stage."""
        model = self._model(model)
        self._ttft.record(stages.total / 1000, self._gen_ai(model))
        for stage, stage_ms in stages.as_dict().items():
            if stage != "ttft":
                attributes = {semconv.BATON_STAGE: stage, semconv.GEN_AI_REQUEST_MODEL: model}
                self._ttft_stage.record(stage_ms / 1000, attributes)

    def observe_itl(self, seconds: float, model: str) -> None:
        """Records one gap between two deltas."""
        self._itl.record(seconds, {semconv.GEN_AI_REQUEST_MODEL: self._model(model)})

    def observe_reply(
        self,
        *,
        outcome: str,
        finish_reason: str,
        duration_s: float,
        prompt_tokens: int,
        completion_tokens: int,
        model: str,
        ttft_s: float | None = None,
    ) -> None:
        """Records the end of a reply.

        Args:
            outcome: done, error, cancelled or abandoned.
            finish_reason: of the last choice; empty if there was none.
            ttft_s: with it the mean time per output token is recorded too.
        """
        model = self._model(model)
        attributes = self._gen_ai(model)
        if ttft_s is not None and completion_tokens > 1:
            self._tpot.record(max(0.0, duration_s - ttft_s) / (completion_tokens - 1), attributes)
        reply = {
            semconv.BATON_OUTCOME: self._outcome(outcome),
            semconv.BATON_FINISH_REASON: self._finish(finish_reason or "none"),
        }
        self._duration.record(duration_s, {**attributes, **reply})
        for kind, num_tokens in (
            (semconv.TOKEN_TYPE_INPUT, prompt_tokens),
            (semconv.TOKEN_TYPE_OUTPUT, completion_tokens),
        ):
            token = {semconv.GEN_AI_TOKEN_TYPE: kind, semconv.GEN_AI_REQUEST_MODEL: model}
            self._tokens.add(num_tokens, token)

    def observe_append(self, num_events: int, seconds: float) -> None:
        """Records one group commit."""
        self._append.record(seconds)
        self._events.add(num_events)

    def retry(self, reason: str) -> None:
        """Counts a call that broke off, so that its reply has to be continued by another."""
        self._retries.add(1, {semconv.BATON_REASON: self._reason(reason)})

    def resume(self, outcome: str) -> None:
        """Counts a client that came back with an event ID."""
        self._resumes.add(1, {semconv.BATON_OUTCOME: self._outcome(outcome)})

    def slow_client(self) -> None:
        """Counts a connection that was closed because its client did not read."""
        self._slow.add(1)

    def watch_streams(self, num_streams: Callable[[], int]) -> None:
        """Reports the number of attached connections whenever somebody reads the metrics."""
        self._watch(semconv.STREAMS, "Connections attached to replies.", num_streams)

    # --- routing

    def pick(self, role: str, outcome: str) -> None:
        """Counts the pick of a worker."""
        self._picks.add(1, {semconv.BATON_ROLE: role, semconv.BATON_OUTCOME: self._outcome(outcome)})

    def watch_workers(self, workers: Callable[[], Iterable[WorkerState]]) -> None:
        """Reports the workers that a gateway knows whenever somebody reads the metrics."""

        def count(_options: CallbackOptions) -> Iterable[Observation]:
            counts = Counter((worker.role, worker.state, worker.breaker) for worker in workers())
            for (role, state, breaker), number in counts.items():
                attributes = {
                    semconv.BATON_ROLE: role,
                    semconv.BATON_STATE: state,
                    semconv.BATON_BREAKER: breaker,
                }
                yield Observation(number, attributes)

        description = "Workers known to this gateway, by role, state and breaker."
        self._meter.create_observable_gauge(semconv.ROUTING_WORKERS, [count], "", description)

    # --- workers

    def prefill_attempt(self, outcome: str) -> None:
        """Counts one call to a prefill worker."""
        self._attempts.add(1, {semconv.BATON_OUTCOME: self._outcome(outcome)})

    def kv_transfer(self, num_bytes: int, seconds: float) -> None:
        """Records one sequence's KV cache, received whole; `seconds` from its first token on."""
        self._kv_bytes.add(num_bytes)
        self._kv_duration.record(seconds)

    def observe_handoff(self, stages: HandoffStages) -> None:
        """Records a handoff gap, as a whole and by stage."""
        self._handoff.record(stages.total / 1000)
        for stage, stage_ms in stages.as_dict().items():
            self._handoff_stage.record(stage_ms / 1000, {semconv.BATON_STAGE: stage})

    def watch_load(self, load: Callable[[], LoadLike]) -> None:
        """Reports an engine's load whenever somebody reads the metrics, maybe from another thread."""
        for name, description, value in (
            (semconv.ENGINE_RUNNING, "Sequences in the batch.", lambda: load().running),
            (semconv.ENGINE_WAITING, "Sequences in the queue.", lambda: load().waiting),
            (semconv.ENGINE_BLOCKS_USED, "KV blocks of live sequences.", lambda: load().blocks_used),
            (semconv.ENGINE_BLOCKS_CACHED, "KV blocks only cached.", lambda: load().blocks_cached),
            (semconv.ENGINE_BLOCKS_TOTAL, "KV blocks there are.", lambda: load().blocks_total),
        ):
            self._watch(name, description, value)
        self._watch_total(
            semconv.ENGINE_PROMPT_TOKENS_COMPUTED,
            "Prompt tokens run through this worker's model.",
            lambda: load().prompt_tokens_computed,
        )
        self._watch_total(
            semconv.ENGINE_TOKENS_RECOMPUTED,
            "Tokens run again: after a preemption, or of a continuation.",
            lambda: load().tokens_recomputed,
        )

    def _watch(self, name: str, description: str, value: Callable[[], int]) -> None:
        self._meter.create_observable_gauge(name, [_observer(value)], "", description)

    def _watch_total(self, name: str, description: str, value: Callable[[], int]) -> None:
        self._meter.create_observable_counter(name, [_observer(value)], "", description)

    def _gen_ai(self, model: str) -> dict[str, str]:
        return {
            semconv.GEN_AI_OPERATION_NAME: semconv.OPERATION_CHAT,
            semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER_BATON,
            semconv.GEN_AI_REQUEST_MODEL: model,
        }


def _observer(value: Callable[[], int]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(value())

    return observe
