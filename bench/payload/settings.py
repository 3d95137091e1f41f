"""What `baton bench payload` measures, and how much of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from services.settings import WorkerSettings

PAGE_BYTES: int = WorkerSettings.model_fields["max_page_bytes"].default


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Lengths in tokens.

    Args:
        prompts: how many, each another mix of the texts.
        prompt_tokens: of each prompt.
        reply_tokens: of each reply, the first of which is the prefill's.
        page_bytes: most of a page before it is narrowed.
        seed: of the order of the texts in the prompts.
        is_quick: a self-check, whose figures mean nothing.
    """

    model: Path
    prompts: int = 24
    prompt_tokens: int = 400
    reply_tokens: int = 64
    page_bytes: int = PAGE_BYTES
    seed: int = 0
    is_quick: bool = False

    def __post_init__(self) -> None:
        if min(self.prompts, self.prompt_tokens, self.page_bytes) < 1:
            raise ValueError("prompts and sizes must be positive")
        if self.reply_tokens < 2:
            raise ValueError("replies must have two tokens or more: the first comes from the prefill")

    def quick(self) -> "Settings":
        """Everything runs, nothing is measured."""
        return replace(self, prompts=2, prompt_tokens=48, reply_tokens=8, page_bytes=16 * 1024, is_quick=True)
