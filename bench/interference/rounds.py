"""What one round measured: raw figures, in seconds from the begin of their window, as in the JSON."""

from dataclasses import dataclass, field

from bench.interference.thread_times import ThreadTimes
from bench.loop_lag import LoopLag


@dataclass(frozen=True, slots=True)
class Gap:
    """From one arrival of tokens to the next of the same stream.

    Attributes:
        began_s: of the gap; it belongs to the window that it began in.
        num_tokens: that ended it. More than one when the text of some was no whole character before.
    """

    stream: int
    began_s: float
    seconds: float
    num_tokens: int = 1

    @property
    def is_itl(self) -> bool:
        """Whether it is the latency of one token: held-back text comes late for another reason."""
        return self.num_tokens == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTimes:
    """One prompt that arrived, as its client saw it; the parts that its worker reports in ms.

    Attributes:
        due_s: when it arrived by schedule, from the begin of the window.
        first_s: from there to its first text. From the schedule, not from the moment of sending: a
            generator that is held up would otherwise hide what holds it up.
        second_s: to its second.
        prefill_ms, transfer_ms, num_bytes: None where nothing was handed over.
    """

    due_s: float
    first_s: float
    second_s: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steady streams for a while, with prompts that arrive or without.

    Attributes:
        num_restarts: of streams within it; what lies between the end of a reply and the next is no gap.
        generator_cpu: share of one core that the load generator took.
        generator_lag: how late its own timers fired.
        threads: of the process that decodes; None where the system does not tell.
    """

    seconds: float
    gaps: tuple[Gap, ...]
    prompts: tuple[PromptTimes, ...]
    num_restarts: int
    generator_cpu: float
    generator_lag: LoopLag
    threads: ThreadTimes | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One arrangement, idle and loaded one right after the other."""

    idle: Window
    loaded: Window


@dataclass(slots=True)
class Round:
    """Everything, once, by name of the arrangement."""

    turns: dict[str, Turn] = field(default_factory=dict)
    short_first_s: dict[str, list[float]] = field(default_factory=dict)  # nothing else runs
