"""Turns a sequence's events into the messages of one Generate call, timings included.

One span covers decoding as a whole; there is none per token.
"""

from grpc import aio

from baton.v1 import decode_pb2
from observability import semconv
from observability.telemetry import Telemetry
from observability.timings import HandoffStages
from services.decode.handoff import HandoffReport
from services.engine.interface import Sequence
from services.engine.request import SequenceFinished, TextGenerated
from services.wire import finish_reason_to_proto, token_to_proto

_MS = 1000.0


class ReplyStream:
    """The writing half of a Generate call."""

    def __init__(self, sequence: Sequence, report: HandoffReport, telemetry: Telemetry) -> None:
        self._sequence = sequence
        self._report = report
        self._telemetry = telemetry
        self._timings_sent = False

    async def write_to(
        self, context: "aio.ServicerContext[decode_pb2.GenerateRequest, decode_pb2.GenerateMessage]"
    ) -> None:
        """Writes deltas as they come, then the end. Raises what the sequence raises."""
        with self._telemetry.tracer.start_as_current_span("decode") as span:
            async for event in self._sequence.events():
                if isinstance(event, TextGenerated):
                    await context.write(decode_pb2.GenerateMessage(delta=self._delta(event)))
                elif isinstance(event, SequenceFinished):
                    span.set_attributes(
                        {
                            semconv.BATON_GENERATED_TOKENS: event.num_generated_tokens,
                            semconv.BATON_PREFILL_TARGET: self._report.target,
                            semconv.BATON_PREFILL_ATTEMPTS: self._report.attempts,
                        }
                    )
                    await context.write(decode_pb2.GenerateMessage(finished=self._finished(event)))

    def _delta(self, event: TextGenerated) -> decode_pb2.Delta:
        delta = decode_pb2.Delta(text=event.text, tokens=map(token_to_proto, event.tokens))
        if not self._timings_sent:
            self._timings_sent = True
            delta.timings.CopyFrom(self._first_text_timings())
        return delta

    def _finished(self, event: SequenceFinished) -> decode_pb2.Finished:
        finished = decode_pb2.Finished(
            reason=finish_reason_to_proto(event.reason),
            tokens=map(token_to_proto, event.tokens),
            num_prompt_tokens=event.num_prompt_tokens,
            num_generated_tokens=event.num_generated_tokens,
            num_cached_tokens=max(event.num_cached_tokens, self._report.num_cached_tokens),
            timings=self._first_text_timings(),
        )
        transfer, timings = self._report.transfer, self._sequence.timings
        if transfer is not None and timings.first_step_s is not None:
            stages = HandoffStages(
                kv_transfer=transfer.after_first_token_s * _MS,
                join=(timings.join_s or 0.0) * _MS,
                first_step=timings.first_step_s * _MS,
            )
            self._telemetry.metrics.observe_handoff(stages)
            finished.handoff.CopyFrom(
                decode_pb2.HandoffTimings(
                    kv_transfer_ms=stages.kv_transfer,
                    join_ms=stages.join,
                    first_step_ms=stages.first_step,
                    num_bytes=transfer.pages.num_bytes,
                    num_pages=transfer.pages.num_pages,
                    num_shared_pages=transfer.pages.num_shared_pages,
                    num_data_pages=transfer.pages.num_data_pages,
                )
            )
        return finished

    def _first_text_timings(self) -> decode_pb2.FirstTextTimings:
        timings, report = self._sequence.timings, self._report
        local_prefill_s = timings.prefill_s if report.target == "local" else None
        return decode_pb2.FirstTextTimings(
            decode_queue_ms=(timings.queue_s or 0.0) * _MS,
            prefill_queue_ms=report.prefill_queue_ms,
            prefill_ms=local_prefill_s * _MS if local_prefill_s is not None else report.prefill_ms,
            text_hold_ms=(timings.text_hold_s or 0.0) * _MS,
            prefill_attempts=report.attempts,
            prefill_target=report.target,
            failed_prefill_targets=report.failed_targets,
        )
