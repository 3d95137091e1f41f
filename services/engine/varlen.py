"""Paged attention on a GPU through torch's variable-length flash attention.

One call serves prompts and single queries alike, and reads the pool through block tables without gathering.
`num_splits=1` keeps a row's sums independent of its company. Never run on a GPU so far; the tests put a plain
implementation in the kernel's place.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# FlashAttention-2, which torch ships, takes pages of a multiple of 256 positions.
PAGE_MULTIPLE = 256
_LARGEST_HEAD = 256

VarlenKernel = Callable[..., torch.Tensor]


@dataclass(slots=True)
class VarlenQueries:
    """Which rows of the batch attend to which blocks.

    Attributes:
        starts: first row of each sequence, and the end, int32 (B + 1,).
        lengths: keys of each sequence, its new ones among them, int32 (B,).
        tables: blocks, padded, int32 (B, num_blocks).
        longest: queries of one sequence.
    """

    kernel: VarlenKernel
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    longest: int

    def attend(
        self,
        queries: torch.Tensor,  # (T, H, D)
        key_pages: torch.Tensor,  # (blocks, block size, KV heads, D)
        value_pages: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """(T, H, D)."""
        return self.kernel(
            queries.contiguous(),
            key_pages,
            value_pages,
            self.starts,
            None,
            self.longest,
            self.tables.shape[1] * key_pages.shape[1],
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=queries.shape[1] != key_pages.shape[2],
            seqused_k=self.lengths,
            block_table=self.tables,
            num_splits=1,
        )


def varlen_kernel(device: torch.device, head_size: int, block_size: int) -> VarlenKernel | None:
    """torch's kernel, where it can read the pool."""
    fits = head_size % 8 == 0 and head_size <= _LARGEST_HEAD and block_size % PAGE_MULTIPLE == 0
    if device.type != "cuda" or not fits:
        return None
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn  # type: ignore[return-value]
