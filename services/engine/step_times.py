"""What one step of the engine's thread took, by part."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.engine.scheduled_chunk import ScheduledChunk


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds on this process's monotonic clock; counts are of the step's batch.

    Attributes:
        schedule_s: waiting for the lock, admitting, choosing what runs.
        forward_s: planning attention and the model's forward pass.
        sample_s: from logits to tokens.
        take_in_s: bookkeeping and events, `detokenize_s` included.
    """

    num_sequences: int
    num_tokens: int
    schedule_s: float
    forward_s: float
    sample_s: float
    take_in_s: float
    detokenize_s: float


@dataclass(slots=True)
class StepClock:
    """Stamps taken as a step goes along; each part ends where the next begins."""

    began: float = field(default_factory=time.perf_counter)
    scheduled: float = 0.0
    forwarded: float = 0.0
    sampled: float = 0.0

    def times(self, chunks: Sequence[ScheduledChunk], detokenize_s: float) -> StepTimes:
        """The step ends now. `detokenize_s` was measured apart, by the sequences."""
        return StepTimes(
            num_sequences=len(chunks),
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            schedule_s=self.scheduled - self.began,
            forward_s=self.forwarded - self.scheduled,
            sample_s=self.sampled - self.forwarded,
            take_in_s=time.perf_counter() - self.sampled,
            detokenize_s=detokenize_s,
        )
