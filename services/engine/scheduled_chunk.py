"""What a step computes of one sequence."""

from dataclasses import dataclass, field

from services.engine.sequence import EngineSequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, end) of one sequence in one step.

    Attributes:
        samples: they end with its last token, as it was when the step was planned.
    """

    sequence: EngineSequence
    start: int
    end: int
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.end == self.sequence.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start
