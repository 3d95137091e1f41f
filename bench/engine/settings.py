"""What `baton bench engine` measures, and how much of it."""

from dataclasses import dataclass, replace
from pathlib import Path

from services.engine.precision import Precision

PEER_BATCH = 16  # the `b16` in the names of the figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Lengths in tokens.

    Args:
        rounds: how often everything is measured, by turns.
        batches, contexts: the sweep; every pair is measured.
        precision: of the fast mode; the exact mode is always fp32.
        peers: whether transformers runs beside ours.
        sweep_tokens: new tokens of each reply of the sweep.
        peer_prompt, peer_tokens: prompt and reply where ours and transformers are compared.
        prefills: prompts whose prefill is timed alone.
        bandwidth_bytes: the buffer that is read to measure memory bandwidth; far above the last cache.
        kv_memory_bytes: most that the KV cache of each of the two engines may take.
    """

    model: Path
    threads: int = 1
    rounds: int = 3
    batches: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (128, 512)
    precision: Precision = Precision.FAST
    peers: bool = True
    sweep_tokens: int = 24
    peer_prompt: int = 128
    peer_tokens: int = 32
    prefills: tuple[int, ...] = (256, 1024)
    bandwidth_bytes: int = 768 * 2**20
    kv_memory_bytes: int = 4 * 2**30
    is_quick: bool = False

    def __post_init__(self) -> None:
        sizes = (self.threads, self.rounds, *self.batches, *self.contexts, *self.prefills)
        if min(sizes) < 1 or not (self.batches and self.contexts):
            raise ValueError("threads, rounds, batches and contexts must be positive, and at least one each")
        if min(self.sweep_tokens, self.peer_tokens) < 2:
            raise ValueError("a reply needs two tokens to have a step between them")

    def quick(self) -> "Settings":
        """A smoke test: everything runs, nothing is measured well."""
        return replace(
            self,
            batches=(1, 4),
            contexts=(24,),
            sweep_tokens=16,
            peer_prompt=24,
            peer_tokens=64,
            prefills=(32, 64),
            bandwidth_bytes=64 * 2**20,
            is_quick=True,
        )

    @property
    def largest_batch(self) -> int:
        return max(*self.batches, PEER_BATCH)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and reply together of all measurements."""
        return max(
            max(self.contexts) + self.sweep_tokens,
            self.peer_prompt + self.peer_tokens,
            max(self.prefills) + 1,
        )
