"""What a time to first token and a handoff gap consist of.

Invariant: the parts add up to the whole. Each stage is a duration between two monotonic stamps of one
process, in milliseconds; `relay` is what is left, the hops between processes. Must not know: where
the numbers come from, and who reports them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftStages:
    """Request arrival to first text byte handed to the socket, stage by stage, in order, in ms."""

    gateway: float = 0.0  # arrival to the call to decode
    decode_queue: float = 0.0  # waiting for blocks
    prefill_queue: float = 0.0  # waiting for a prefill worker, lost attempts included
    prefill: float = 0.0  # first chunk scheduled to first token sampled
    text_hold: float = 0.0  # first token in hand to first whole text
    log_append: float = 0.0  # first text to its place in the log
    flush: float = 0.0  # logged to handed to the socket
    relay: float = 0.0  # the rest: hops between processes

    @classmethod
    def from_parts(
        cls,
        total_ms: float,
        *,
        gateway: float,
        decode_queue: float,
        prefill_queue: float,
        prefill: float,
        text_hold: float,
        log_append: float,
        flush: float,
    ) -> "TtftStages":
        """The stages of a measured total. `relay` takes the remainder and is never negative."""
        parts = {
            "gateway": gateway,
            "decode_queue": decode_queue,
            "prefill_queue": prefill_queue,
            "prefill": prefill,
            "text_hold": text_hold,
            "log_append": log_append,
            "flush": flush,
        }
        return cls(**parts, relay=max(0.0, total_ms - sum(parts.values())))

    @property
    def total(self) -> float:
        """The time to first token in ms."""
        return sum(self._stages().values())

    def as_dict(self) -> dict[str, float]:
        """`{stage: ms, ..., "ttft": total}`, the form of the terminal event and the state route."""
        return {**self._stages(), "ttft": self.total}

    @classmethod
    def from_dict(cls, timings: Mapping[str, float]) -> "TtftStages":
        """Reads `as_dict` back; missing stages are 0, entries of other kinds are left alone."""
        return cls(**{name: float(timings.get(name, 0.0)) for name in TTFT_STAGES})

    def _stages(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in TTFT_STAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStages:
    """First to second token when the KV cache came from another worker, in ms."""

    kv_transfer: float = 0.0  # first token in hand to last page verified
    join: float = 0.0  # waiting for the next step
    first_step: float = 0.0  # that step

    @property
    def total(self) -> float:
        """The handoff gap in ms."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, float]:
        """`{stage: ms}`, without the total."""
        return {name: getattr(self, name) for name in HANDOFF_STAGES}

    @classmethod
    def from_dict(cls, timings: Mapping[str, float]) -> "HandoffStages | None":
        """The stages among a reply's timings; None for a reply that was not handed over."""
        if not all(name in timings for name in HANDOFF_STAGES):
            return None
        return cls(**{name: float(timings[name]) for name in HANDOFF_STAGES})


TTFT_STAGES: tuple[str, ...] = tuple(field.name for field in fields(TtftStages))
HANDOFF_STAGES: tuple[str, ...] = tuple(field.name for field in fields(HandoffStages))
