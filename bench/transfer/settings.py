"""What `baton bench transfer` measures, and how much of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from services.engine.precision import Precision
from services.settings import WorkerSettings

PAGE_BYTES: int = WorkerSettings.model_fields["max_page_bytes"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Lengths in tokens.

    Args:
        rounds: how often every way is measured, by turns.
        num_bytes: of the cache whose transfer is timed, about.
        page_bytes: most of a message's payload.
        prompts: lengths of the prompts whose overlap is measured.
        overlap_rounds: how often each of these is computed and handed over.
    """

    model: Path
    rounds: int = 15
    num_bytes: int = 256 * 1024 * 1024
    page_bytes: int = PAGE_BYTES
    prompts: tuple[int, ...] = (256, 1024, 4096, 8000)
    overlap_rounds: int = 3
    precision: Precision = Precision.FP32
    is_quick: bool = False

    def __post_init__(self) -> None:
        if min(self.rounds, self.overlap_rounds, self.num_bytes, self.page_bytes) < 1:
            raise ValueError("rounds and sizes must be positive")
        if not self.prompts or min(self.prompts) < 2:
            raise ValueError("prompts must have two tokens or more: one needs no handoff")

    def quick(self) -> "Settings":
        """A self-check: everything runs, nothing is measured."""
        return replace(
            self, rounds=2, num_bytes=8 * 1024 * 1024, prompts=(32, 64), overlap_rounds=1, is_quick=True
        )
