"""One forward pass over the flattened tokens of a step.

Knows token IDs, positions and where attention finds its cache; not whose tokens they are.
"""

from collections.abc import Sequence
from typing import Any

import torch

from services.engine import attention
from services.engine.attention import AttentionStep
from services.engine.graph_model import Forward


class EagerModel:
    """A model as transformers runs it, as a `Forward`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        output = self._model(
            input_ids=token_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows
        )
        logits: torch.Tensor = output.logits
        return logits


class ForwardPass:
    """Runs `compute` over lists of numbers.

    Attributes:
        min_rows: rows that fewer tokens are padded to, and fewer rows of logits.
    """

    def __init__(self, compute: Forward, device: torch.device, min_rows: int = 1) -> None:
        self.compute = compute
        self.min_rows = min_rows
        self._device = device

    def run(
        self, step: AttentionStep, token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> torch.Tensor:
        """Logits of the tokens in `rows`, (len(rows), vocabulary) in fp32."""
        inputs = self.inputs(token_ids, positions, rows)
        token = attention.CURRENT_STEP.set(step)
        try:
            logits = self.compute(*inputs)
        finally:
            attention.CURRENT_STEP.reset(token)
        return logits[0, : len(rows)].float()

    def inputs(
        self, token_ids: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(1, T), (1, T) and (S,), padded by repeating the last ones."""
        return (
            self._tensor(token_ids).unsqueeze(0),
            self._tensor(positions).unsqueeze(0),
            self._tensor(rows),
        )

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        padding = [values[-1]] * (self.min_rows - len(values))
        return torch.tensor([*values, *padding], device=self._device)
