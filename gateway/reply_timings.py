"""Where the time of one reply went: stamps of this process, and the stages that workers report.

Invariant: every duration lies between two stamps of one process's monotonic clock; what no stage
claims is `relay`. Must not know: events, spans, how stages are published.
"""

from baton.v1 import decode_pb2
from gateway.decode_call import DecodeCall
from gateway.events import EventKind
from gateway.owned_reply import OwnedReply
from observability.timings import HandoffStages, TtftStages

_MS = 1000.0


class ReplyTimings:
    """Collects the stages of one reply. The first delta of any choice is the reply's first text."""

    def __init__(self, reply: OwnedReply) -> None:
        self._reply = reply
        self._sent_at: float | None = None
        self._received_at = 0.0
        self._reported = decode_pb2.FirstTextTimings()
        self.handoff: HandoffStages | None = None
        # The first text of a reply that was taken over came from another process, by its clock.
        self._is_first_owner = not any(event.kind is EventKind.DELTA for event in reply.events)

    @property
    def has_text(self) -> bool:
        return self._sent_at is not None

    def note_delta(self, call: DecodeCall, delta: decode_pb2.Delta, now: float) -> None:
        """Notes a delta that is about to be emitted."""
        if self._sent_at is None and self._is_first_owner:
            # The call that brought the text: what was lost on others before is the gateway's time.
            self._sent_at = call.sent_at
            self._received_at = call.first_message_at if call.first_message_at is not None else now
            self._reported = delta.timings

    def note_finished(self, finished: decode_pb2.Finished, num_calls: int) -> None:
        """Notes a choice's end. The handoff of a continuation is not between first and second token."""
        if self.handoff is None and finished.HasField("handoff") and num_calls == 1:
            self.handoff = HandoffStages(
                kv_transfer=finished.handoff.kv_transfer_ms,
                join=finished.handoff.join_ms,
                first_step=finished.handoff.first_step_ms,
            )

    def ttft(self) -> TtftStages | None:
        """The stages of the first text; None as long as none was emitted and published.

        Waiting for the log to be created, while the worker was at it already, is `log_append` too.
        """
        reply, committed_at = self._reply, self._reply.first_delta_committed_at
        if self._sent_at is None or committed_at is None:
            return None
        shown_at = reply.first_text_sent_at
        seen_at = max(shown_at, committed_at) if shown_at is not None else committed_at
        return TtftStages.from_parts(
            (seen_at - reply.arrived) * _MS,
            gateway=(self._sent_at - reply.arrived) * _MS,
            decode_queue=self._reported.decode_queue_ms,
            prefill_queue=self._reported.prefill_queue_ms,
            prefill=self._reported.prefill_ms,
            text_hold=self._reported.text_hold_ms,
            log_append=(committed_at - self._received_at) * _MS,
            flush=(seen_at - committed_at) * _MS,
        )

    def as_dict(self, total_ms: float) -> dict[str, float]:
        """For the terminal event: the stages there are, and `total`, in milliseconds."""
        ttft = self.ttft()
        stages = {
            **(ttft.as_dict() if ttft is not None else {}),
            **(self.handoff.as_dict() if self.handoff is not None else {}),
            "total": total_ms,
        }
        return {name: round(ms, 3) for name, ms in stages.items()}
