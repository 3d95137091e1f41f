"""What `baton bench threshold` measures, and how much of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from services.engine.precision import Precision

LENGTHS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Lengths in tokens.

    Args:
        rounds: how often everything is measured, by turns.
        lengths: of the prompts, none of whose tokens is in a prefix cache; sorted, each once.
        streams: that run steadily.
        stall_bound: largest gap of the steady streams that local prefill may cause, in p99s of their gaps
            while nothing else happens.
        asks: prompts of each length and way in a round, each with nothing else running and beside streams.
        threads: of each worker, on as many cores of its own where there are enough.
        rest_tokens: of each steady stream between two prompts; their gaps are the idle ones.
        reply_tokens: of an arriving prompt: two that are timed, and one so that the second is not the end.
        steady_prompt_tokens, steady_tokens: of a steady stream; longer than the prompts of a length take.
    """

    model: Path
    rounds: int = 5
    lengths: tuple[int, ...] = LENGTHS
    streams: int = 4
    stall_bound: float = 2.0
    precision: Precision = Precision.FP32
    threads: int = 1
    asks: int = 3
    rest_tokens: int = 12
    reply_tokens: int = 3
    steady_prompt_tokens: int = 16
    steady_tokens: int = 2000
    is_quick: bool = False

    def __post_init__(self) -> None:
        if min(self.rounds, self.streams, self.asks, self.threads, self.rest_tokens) < 1:
            raise ValueError("--rounds, --streams and --threads must be positive")
        if not self.lengths or min(self.lengths) < 2:
            raise ValueError(
                "--lengths: two tokens or more, since decode computes a last token always itself"
            )
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError("--lengths: in ascending order, each once, like 16,64,256")
        if self.stall_bound < 1:
            raise ValueError(
                "--stall-bound: 1 or more, since 1 is the streams' own p99 with no prompt arriving"
            )
        if self.reply_tokens < 3:
            raise ValueError("a reply needs a third token, or its second would be its end")

    def quick(self) -> "Settings":
        """A self-check: everything runs, nothing is measured."""
        return replace(self, rounds=1, lengths=(2, 16), streams=2, asks=1, rest_tokens=4, is_quick=True)
