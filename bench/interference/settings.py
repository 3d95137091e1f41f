"""What `baton bench interference` measures, and how much of it."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from services.engine.precision import Precision

NUM_CORES = 2  # that every arrangement gets: one a worker, or both for a colocated one
CHUNK_TOKENS = 128  # of a prompt in one step, colocated with chunked prefill

_HANDFUL = 5  # stalls that must not decide a p99
_MOST_STRETCH = 3  # a window that lacks gaps goes on for so many times its length


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Lengths in tokens, times in seconds.

    Args:
        rounds: how often every arrangement is measured, by turns.
        duration_s: of a window, at least; it ends with a whole number of `every_s`.
        every_s: from one arriving prompt to the next, whether or not the one before has been answered.
        prompt_tokens: of an arriving prompt.
        streams: that run steadily.
        floor: also measure the split with its prompts computed, but not handed over.
        reply_tokens: of an arriving prompt. More than one, or no KV cache would have to be handed over.
        steady_prompt_tokens: short, so that the streams begin without disturbing each other for long.
        steady_tokens: of a steady reply; more than a window holds, so that none begins within one.
        short_prompts: how many of `short_prompt_tokens` are timed with nothing else running.
        needs_gaps: whether a window must hold enough gaps for its p99 to mean something.
    """

    model: Path
    rounds: int = 3
    duration_s: float = 60.0
    every_s: float = 8.0
    prompt_tokens: int = 1500
    streams: int = 4
    precision: Precision = Precision.FP32
    floor: bool = False
    reply_tokens: int = 16
    steady_prompt_tokens: int = 16
    steady_tokens: int = 4000
    short_prompts: int = 8
    short_prompt_tokens: int = 64
    needs_gaps: bool = True
    is_quick: bool = False

    def __post_init__(self) -> None:
        if min(self.rounds, self.streams, self.prompt_tokens, self.short_prompts) < 1:
            raise ValueError("rounds, streams and prompts must be positive")
        if min(self.duration_s, self.every_s) <= 0:
            raise ValueError("durations must be positive")
        if self.duration_s < self.every_s:
            raise ValueError("a window must be long enough for one prompt to arrive")
        if self.reply_tokens < 2:
            raise ValueError("a reply of one token needs no handoff")

    def quick(self) -> "Settings":
        """A self-check: everything runs, nothing is measured."""
        return replace(
            self,
            rounds=1,
            duration_s=2.0,
            every_s=1.0,
            prompt_tokens=160,
            reply_tokens=4,
            short_prompts=1,
            needs_gaps=False,
            is_quick=True,
        )

    @property
    def needed_gaps(self) -> int:
        """Gaps in a window without which a handful of stalls decides its p99.

        A stalled step delays every stream, so a handful of stalls are the `_HANDFUL` x streams longest gaps
        of a window. Its p99, by nearest rank, must lie below them: of n gaps, n / 100 are longer than it.
        """
        return 100 * _HANDFUL * self.streams

    @property
    def most_periods(self) -> int:
        """Periods of `every_s` after which a window that still lacks gaps is given up."""
        return math.ceil(_MOST_STRETCH * self.duration_s / self.every_s)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and reply together."""
        return max(self.prompt_tokens + self.reply_tokens, self.steady_prompt_tokens + self.steady_tokens)
