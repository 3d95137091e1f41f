"""Which part of a sequence's KV cache a page holds."""

from typing import NamedTuple


class PageRange(NamedTuple):
    """Layers and context positions, ends exclusive."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def num_tokens(self) -> int:
        return self.token_end - self.token_start

    def __str__(self) -> str:
        return f"layers {self.layer_start}-{self.layer_end}, tokens {self.token_start}-{self.token_end}"
