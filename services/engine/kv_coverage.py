"""Which parts of a sequence's KV cache have been imported.

Invariant: each (layer, position) is imported at most once per attempt; a page that would repeat one,
or lies outside, changes nothing.
"""

import torch

from services.engine.errors import InvalidKvPage
from services.engine.page_range import PageRange


class KvCoverage:
    """A flag for every layer of every context token."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self._imported = torch.zeros(num_layers, num_tokens, dtype=torch.bool)
        self._num_held = 0

    @property
    def is_complete(self) -> bool:
        return bool(self._imported.all())

    def check(self, where: PageRange) -> None:
        """Raises InvalidKvPage if the range is empty, outside, or partly imported already."""
        num_layers, num_tokens = self._imported.shape
        layer_start, layer_end, token_start, token_end = where
        if not (0 <= layer_start < layer_end <= num_layers and 0 <= token_start < token_end <= num_tokens):
            raise InvalidKvPage(f"{where} lie outside {num_layers} layers of {num_tokens} tokens")
        if self._imported[layer_start:layer_end, token_start:token_end].any():
            raise InvalidKvPage(f"{where}: imported already")

    def add(self, where: PageRange) -> None:
        """Marks a range as imported. Raises what `check` does; then nothing is marked."""
        self.check(where)
        self._imported[where.layer_start : where.layer_end, where.token_start : where.token_end] = True

    def hold(self, num_tokens: int) -> None:
        """The first tokens are there already, in blocks that others may read: no page may repeat them."""
        self._num_held = num_tokens
        self._imported[:, :num_tokens] = True

    def reset(self) -> None:
        """Forgets everything imported."""
        self._imported[:, self._num_held :] = False
