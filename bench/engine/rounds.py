"""What one round measured: raw figures, in seconds and tokens per second, as they go into the JSON."""

from dataclasses import dataclass, field

from bench.engine.step_split import StepSplit
from bench.loop_lag import LoopLag


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """Greedy decode steps of one mode, the whole batch together."""

    mode: str
    batch: int
    context: int  # tokens of each prompt; the replies add to it while they grow
    split: StepSplit

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.split.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesPoint:
    """Decode steps at batch 16 with every sampling feature on, and the event loop meanwhile."""

    mode: str
    split: StepSplit
    lag: LoopLag


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What ours and transformers were both timed at.

    Attributes:
        step_s: one stream; (time of n tokens - time of 1) / (n - 1).
        decode_tokens_per_s: 16 streams; (tokens - 16) / (time of n tokens each - time of 1 each). Slow
            prefill does not count against anybody.
        run_tokens_per_s: 16 streams; all new tokens / time of n tokens each, prefill included.
        prefill_s: prompt tokens -> time to the first token of that prompt, alone.
        single_replies, batch_replies: greedy token IDs, to be compared.
    """

    name: str
    step_s: float
    decode_tokens_per_s: float
    run_tokens_per_s: float
    prefill_s: dict[int, float]
    single_replies: tuple[tuple[int, ...], ...]
    batch_replies: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Round:
    """Everything, once."""

    bytes_per_s: float
    sweep: list[SweepPoint] = field(default_factory=list)
    features: list[FeaturesPoint] = field(default_factory=list)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
