"""Attention over the paged KV cache, hooked into transformers' attention interface.

One function serves every model: it writes the step's keys and values into the pool and attends over
what the block tables name. It relies on three measured facts of CPU kernels, so that a token's logits
do not depend on its company in the batch: gathered KV is padded to a multiple of 16 positions, queries
to at least 4 rows, and query heads that share a KV head are folded into rows instead of repeating KV.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from services.engine.kv_cache import KvCache

IMPLEMENTATION = "baton_paged"
KV_MULTIPLE = 16
_MIN_QUERY_ROWS = 4


@dataclass(slots=True)
class AttentionGroup:
    """Sequences with equally many queries that attend in one call.

    Attributes:
        rows: places of the queries in the flattened batch, (B * n,).
        blocks: pool blocks of each sequence, padded, (B, num_blocks); L = num_blocks x block size.
        positions: of the queries, (B, n).
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    positions: torch.Tensor
    length: int  # L
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, heads_per_kv: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask (B, 1, num_rows, L); padding rows see position 0 and are thrown away."""
        key = (window, num_rows)
        if key not in self._masks:
            places = torch.arange(self.length)
            queries = self.positions.unsqueeze(-1)  # (B, n, 1)
            allowed = places <= queries
            if window is not None:
                allowed &= places > queries - window
            bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))
            bias = bias.repeat(1, heads_per_kv, 1)  # (B, heads_per_kv * n, L)
            padding = num_rows - bias.shape[1]
            if padding:
                first_only = torch.full((bias.shape[0], padding, bias.shape[2]), float("-inf"), dtype=dtype)
                first_only[:, :, 0] = 0
                bias = torch.cat((bias, first_only), dim=1)
            self._masks[key] = bias.unsqueeze(1)
        return self._masks[key]


@dataclass(slots=True)
class AttentionStep:
    """What the attention function needs to know of one forward pass."""

    cache: KvCache
    new_slots: torch.Tensor  # (T,) where the step's keys and values go
    groups: list[AttentionGroup]
    num_calls: int = 0


# Some models drop keyword arguments that they do not know, so the step travels beside the call.
CURRENT_STEP: ContextVar[AttentionStep] = ContextVar("baton_attention_step")


class UnsupportedAttention(Exception):
    """A feature of the model's attention that is not implemented here."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    key: torch.Tensor,  # (1, KV heads, T, D)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Returns (1, T, H, D). Raises UnsupportedAttention for soft-capping and attention sinks."""
    for name in ("softcap", "s_aux"):
        if features.get(name) is not None:
            raise UnsupportedAttention(name)
    step = CURRENT_STEP.get()
    step.num_calls += 1
    keys, values = step.cache.layer(int(module.layer_idx))  # type: ignore[arg-type]
    keys.index_copy_(0, step.new_slots, key[0].transpose(0, 1))
    values.index_copy_(0, step.new_slots, value[0].transpose(0, 1))
    num_heads, num_kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
    heads_per_kv = num_heads // num_kv_heads
    queries = query[0].transpose(0, 1)  # (T, H, D)
    output = torch.empty_like(queries)
    for group in step.groups:
        batch, count = group.positions.shape
        # (B * n, H, D) -> (B, KV heads, heads_per_kv * n, D)
        q = queries[group.rows].view(batch, count, num_kv_heads, heads_per_kv, head_size)
        q = q.permute(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, heads_per_kv * count, head_size)
        num_rows = max(q.shape[2], _MIN_QUERY_ROWS)
        if num_rows > q.shape[2]:
            q = F.pad(q, (0, 0, 0, num_rows - q.shape[2]))
        attended = F.scaled_dot_product_attention(
            q,
            _gather(keys, group).transpose(1, 2),  # (B, KV heads, L, D)
            _gather(values, group).transpose(1, 2),
            attn_mask=group.mask(sliding_window, heads_per_kv, num_rows, q.dtype),
            scale=scaling,
        )
        attended = attended[:, :, : heads_per_kv * count]
        attended = attended.reshape(batch, num_kv_heads, heads_per_kv, count, head_size)
        output[group.rows] = attended.permute(0, 3, 1, 2, 4).reshape(batch * count, num_heads, head_size)
    return output.unsqueeze(0), None


def _gather(pool: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """(slots, KV heads, D) -> (B, L, KV heads, D). Whole blocks: ten times faster than slot by slot."""
    batch, num_blocks = group.blocks.shape
    block_size = group.length // num_blocks
    by_block = pool.view(-1, block_size, *pool.shape[1:])
    return by_block.index_select(0, group.blocks.flatten()).view(batch, group.length, *pool.shape[1:])


AttentionInterface.register(IMPLEMENTATION, paged_attention)
