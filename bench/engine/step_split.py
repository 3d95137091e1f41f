"""Where the time of a decode step goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.errors import BenchFailed
from services.engine.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Mean seconds of one decode step, over the steps in which the whole batch ran and nothing else.

    Attributes:
        forward_s: the model's forward pass, planning its attention included.
        sampling_s: from logits to tokens.
        detokenizing_s: from tokens to text, stop strings included.
        scheduling_s: all else: lock, admission, choice of what runs, taking results in, handing them over.
    """

    num_steps: int
    forward_s: float
    sampling_s: float
    detokenizing_s: float
    scheduling_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.sampling_s + self.detokenizing_s + self.scheduling_s

    @property
    def overhead(self) -> float:
        """Share of the step outside the forward pass."""
        return 1 - self.forward_s / self.step_s


def split_decode_steps(steps: Sequence[StepTimes], batch: int, at_least: int) -> StepSplit:
    """Raises BenchFailed if the whole batch ran together in fewer than `at_least` steps."""
    full = [step for step in steps if step.num_sequences == step.num_tokens == batch]
    if len(full) < at_least:
        raise BenchFailed(f"only {len(full)} steps, not {at_least}, held all {batch} sequences")
    return StepSplit(
        num_steps=len(full),
        forward_s=fmean(step.forward_s for step in full),
        sampling_s=fmean(step.sample_s for step in full),
        detokenizing_s=fmean(step.detokenize_s for step in full),
        scheduling_s=fmean(step.schedule_s + step.take_in_s - step.detokenize_s for step in full),
    )
