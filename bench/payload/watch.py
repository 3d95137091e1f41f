"""A model runner that keeps the logits of a reply, and can lead the reply along given tokens."""

from collections.abc import Sequence

import torch

from services.engine.attention import OnLayer
from services.engine.model_runner import ModelRunner
from services.engine.scheduled_chunk import ScheduledChunk


class Watch:
    """Of one sequence at a time; read when its reply has ended.

    Attributes:
        logits: (vocabulary,) for each token of the reply that was sampled, in order, as the model gave them.
    """

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self._led: Sequence[int] = ()

    def begin(self, led: Sequence[int] = ()) -> None:
        """Forgets what it holds; the next reply is to be `led`, its first token included, or what it will."""
        self.logits, self._led = [], led

    def see(self, logits: torch.Tensor, place: int) -> None:
        """One row, about to be sampled from for the reply's token number `place`; leads it."""
        self.logits.append(logits.clone())
        if self._led:
            logits[self._led[place]] = logits.max() + 1


def watched_by(watch: Watch) -> type[ModelRunner]:
    """A runner for an engine to be built with."""

    class WatchedRunner(ModelRunner):
        @torch.inference_mode()
        def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
            logits = super().forward(chunks, on_layer)
            sequences = [chunk.sequence for chunk in chunks if chunk.samples]
            for row, sequence in zip(logits, sequences, strict=True):
                watch.see(row, sequence.num_generated_tokens)
            return logits

    return WatchedRunner
