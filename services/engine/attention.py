"""Attention over the paged KV cache, hooked into transformers' attention interface.

One function serves every model: it writes the step's keys and values into the pool and attends over
what the block tables name. It relies on three measured facts of CPU kernels, so that a token's logits
do not depend on its company in the batch: gathered KV is padded to a multiple of 16 positions, queries
to at least 4 rows, and query heads that share a KV head are folded into rows instead of repeating KV.

Soft-capped scores and attention sinks, which torch's fused kernel does not offer, are computed step by
step; for models that use them a row may differ in the last bits with its company.
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


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    key: torch.Tensor,  # (1, KV heads, T, D)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # (H,) a score that takes its share of each row and gives nothing
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Returns (1, T, H, D)."""
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
        k = _gather(keys, group).transpose(1, 2)  # (B, KV heads, L, D)
        v = _gather(values, group).transpose(1, 2)
        mask = group.mask(sliding_window, heads_per_kv, num_rows, q.dtype)
        if softcap is None and s_aux is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            sinks = None if s_aux is None else _sink_rows(s_aux, num_kv_heads, count, num_rows)
            scale = scaling if scaling is not None else head_size**-0.5
            attended = _attend_stepwise(q * scale, k, v, mask, softcap, sinks)
        attended = attended[:, :, : heads_per_kv * count]
        attended = attended.reshape(batch, num_kv_heads, heads_per_kv, count, head_size)
        output[group.rows] = attended.permute(0, 3, 1, 2, 4).reshape(batch * count, num_heads, head_size)
    return output.unsqueeze(0), None


def _attend_stepwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with `softcap * tanh(scores / softcap)` and a sink column; shapes as in the fused call."""
    scores = q @ k.transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1) @ v
    column = sinks.expand(scores.shape[0], -1, -1, -1)
    weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)
    return weights[..., :-1] @ v


def _sink_rows(s_aux: torch.Tensor, num_kv_heads: int, count: int, num_rows: int) -> torch.Tensor:
    """Sinks by query row, (1, KV heads, num_rows, 1); padding rows get 0."""
    rows = s_aux.view(num_kv_heads, -1, 1).expand(-1, -1, count).reshape(1, num_kv_heads, -1, 1)
    return F.pad(rows, (0, 0, 0, num_rows - rows.shape[2]))


def _gather(pool: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """(slots, KV heads, D) -> (B, L, KV heads, D). Whole blocks: ten times faster than slot by slot."""
    batch, num_blocks = group.blocks.shape
    block_size = group.length // num_blocks
    by_block = pool.view(-1, block_size, *pool.shape[1:])
    return by_block.index_select(0, group.blocks.flatten()).view(batch, group.length, *pool.shape[1:])


AttentionInterface.register(IMPLEMENTATION, paged_attention)
