"""Attention over the paged KV cache, hooked into transformers' attention interface.

One function serves every model: it writes the step's keys and values into the pool and attends over
what the block tables name. In fp32 on a CPU a token's logits do not depend on its company, its chunk, its
blocks or the padding, to the bit; `kv_lengths.py` and `linear_packing.py` say what else that takes. Here:
queries are padded to a multiple of 4 rows (the matrix kernel takes other paths for what is left over),
and query heads that share a KV head are folded into rows. It costs up to a third of a short
step's attention where the heads per KV head are no multiple of 4.

Soft-capped scores and attention sinks, which torch's fused kernel does not offer, are computed step by
step; for models that use them a row may differ in the last bits with its company.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from services.engine.capture import leaf
from services.engine.kv_cache import KvCache, KvLayer
from services.engine.varlen import VarlenQueries

IMPLEMENTATION = "baton_paged"
_QUERY_MULTIPLE = 4

OnLayer = Callable[[int], None]  # told the index of a layer whose keys and values have been written


@dataclass(slots=True)
class AttentionGroup:
    """Sequences with equally many queries that attend in one call.

    Attributes:
        rows: places of the queries in the flattened batch, (B * n,), or the range of them.
        flat_blocks: pool blocks of each sequence, padded to num_blocks, (B * num_blocks,).
        positions: of the queries, (B, n).
        length: positions that are read of each sequence, L = num_blocks x block size.
        is_whole_step: the rows are all rows of the batch, in order.
    """

    rows: torch.Tensor | slice
    flat_blocks: torch.Tensor
    positions: torch.Tensor
    length: int
    is_whole_step: bool = False
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, heads_per_kv: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask (B, 1, num_rows, L), (B, 1, 1, L) if n is 1; padding sees what the last does."""
        key = (window, num_rows)
        if key not in self._masks:
            places = torch.arange(self.length, device=self.positions.device)
            queries = self.positions.unsqueeze(-1)  # (B, n, 1)
            allowed = places <= queries
            if window is not None:
                allowed &= places > queries - window
            bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
                ~allowed, float("-inf")
            )
            if bias.shape[1] > 1:
                bias = bias.repeat(1, heads_per_kv, 1)  # (B, heads_per_kv * n, L)
                if padding := num_rows - bias.shape[1]:
                    bias = torch.cat((bias, bias[:, -1:].expand(-1, padding, -1)), dim=1)
            self._masks[key] = bias.unsqueeze(1)
        return self._masks[key]

    def forget_masks(self) -> None:
        """After the positions have been changed in place."""
        self._masks.clear()


@dataclass(slots=True)
class AttentionStep:
    """What the attention function needs to know of one forward pass."""

    cache: KvCache
    new_slots: torch.Tensor  # (T,) where the step's keys and values go; rows of the batch after T are padding
    groups: list[AttentionGroup]
    varlen: VarlenQueries | None = None  # on a GPU, for layers that its kernel can compute
    num_calls: int = 0
    on_layer: OnLayer | None = None


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
    layer = _layer(module.layer_idx, scaling, sliding_window, softcap)
    return leaf(layer.attend, query, key, value, s_aux), None


@dataclass(frozen=True, slots=True)
class _LayerAttention:
    """Attention of one layer, over the step in `CURRENT_STEP`."""

    index: int
    scaling: float | None
    window: int | None
    softcap: float | None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """What `paged_attention` does; rows of padding get zeros."""
        step = CURRENT_STEP.get()
        step.num_calls += 1
        num_tokens = step.new_slots.shape[0]
        if padding := query.shape[2] - num_tokens:
            query, key, value = query[:, :, :num_tokens], key[:, :, :num_tokens], value[:, :, :num_tokens]
            return F.pad(self._attend_step(step, query, key, value, sinks), (0, 0, 0, 0, 0, padding))
        return self._attend_step(step, query, key, value, sinks)

    def _attend_step(
        self,
        step: AttentionStep,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        kv = step.cache.layers[self.index]
        kv.keys.index_copy_(0, step.new_slots, key[0].transpose(0, 1))
        kv.values.index_copy_(0, step.new_slots, value[0].transpose(0, 1))
        if step.on_layer is not None:
            step.on_layer(self.index)
        if step.varlen is not None and self.softcap is None and sinks is None:
            shape = (-1, step.cache.block_size, key.shape[1], key.shape[3])
            keys, values = kv.key_blocks.view(shape), kv.value_blocks.view(shape)
            queries = query[0].transpose(0, 1)
            return step.varlen.attend(queries, keys, values, self.scaling, self.window).unsqueeze(0)
        if len(step.groups) == 1 and step.groups[0].is_whole_step:
            return self._attend_group(query[0], step.groups[0], kv, sinks).unsqueeze(0)
        output = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        for group in step.groups:
            output[0, group.rows] = self._attend_group(query[0][:, group.rows], group, kv, sinks)
        return output

    def _attend_group(
        self, queries: torch.Tensor, group: AttentionGroup, kv: KvLayer, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """(H, B * n, D) -> (B * n, H, D)."""
        num_heads, num_tokens, head_size = queries.shape
        batch, count = group.positions.shape
        k = _gather(kv.key_blocks, group, head_size)
        v = _gather(kv.value_blocks, group, head_size)
        num_kv_heads = k.shape[1]
        heads_per_kv = num_heads // num_kv_heads
        # -> (B, KV heads, heads_per_kv * n, D); a single query needs no copy
        if count == 1:
            q = queries.view(num_kv_heads, heads_per_kv, batch, head_size).permute(2, 0, 1, 3)
        else:
            q = queries.reshape(num_kv_heads, heads_per_kv, batch, count, head_size)
            q = q.permute(2, 0, 1, 3, 4).reshape(batch, num_kv_heads, heads_per_kv * count, head_size)
        num_rows = heads_per_kv * count
        if padding := -num_rows % _QUERY_MULTIPLE:
            q = F.pad(q, (0, 0, 0, padding))
        mask = group.mask(self.window, heads_per_kv, q.shape[2], q.dtype)
        if self.softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scaling)
        else:
            columns = None if sinks is None else _sink_rows(sinks, num_kv_heads, count, q.shape[2])
            scale = self.scaling if self.scaling is not None else head_size**-0.5
            attended = _attend_stepwise(q * scale, k, v, mask, self.softcap, columns)
        attended = attended[:, :, :num_rows]
        if count > 1:
            attended = attended.reshape(batch, num_kv_heads, heads_per_kv, count, head_size)
            attended = attended.permute(0, 3, 1, 2, 4)
        return attended.reshape(num_tokens, num_heads, head_size)


# Kept, so that two recordings of a layer call the same function.
_layer = cache(_LayerAttention)


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


def _gather(blocks: torch.Tensor, group: AttentionGroup, head_size: int) -> torch.Tensor:
    """(blocks, block size * KV heads * D) -> (B, KV heads, L, D). Whole blocks: ten times faster."""
    gathered = blocks.index_select(0, group.flat_blocks)
    return gathered.view(group.positions.shape[0], group.length, -1, head_size).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
