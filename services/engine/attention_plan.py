"""Who attends together in a step, and where its new keys and values go."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from services.engine.attention import AttentionGroup, AttentionStep
from services.engine.block_manager import blocks_for
from services.engine.kv_cache import KvCache
from services.engine.kv_lengths import KvLengths
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.varlen import VarlenKernel, VarlenQueries


def plan_attention(
    chunks: Sequence[ScheduledChunk],
    cache: KvCache,
    lengths: KvLengths,
    kernel: VarlenKernel | None = None,
) -> AttentionStep:
    """Places of new keys and values, and who attends together.

    Single queries attend in groups of similar length (padding at most doubles what is read), longer
    chunks alone.
    """
    groups: list[AttentionGroup] = []
    single: dict[int, list[tuple[int, ScheduledChunk]]] = defaultdict(list)
    new_slots: list[int] = []
    row = 0
    for chunk in chunks:
        table, size = chunk.sequence.block_table, cache.block_size
        new_slots += [table[i // size] * size + i % size for i in range(chunk.start, chunk.end)]
        if chunk.num_tokens == 1:
            single[blocks_for(chunk.end, size).bit_length()].append((row, chunk))
        else:
            groups.append(_group([chunk], cache, lengths, range(row, row + chunk.num_tokens)))
        row += chunk.num_tokens
    groups += [
        _group([chunk for _, chunk in members], cache, lengths, [row for row, _ in members])
        for members in single.values()
    ]
    for group in groups:
        group.is_whole_step = isinstance(group.rows, slice) and group.rows == slice(0, row)
    varlen = None if kernel is None else _varlen(chunks, cache, kernel)
    return AttentionStep(cache, torch.tensor(new_slots, device=cache.device), groups, varlen)


def _varlen(chunks: Sequence[ScheduledChunk], cache: KvCache, kernel: VarlenKernel) -> VarlenQueries:
    tables = [chunk.sequence.block_table[: blocks_for(chunk.end, cache.block_size)] for chunk in chunks]
    width = max(map(len, tables))
    counts = [chunk.num_tokens for chunk in chunks]
    int32: dict[str, Any] = {"dtype": torch.int32, "device": cache.device}
    return VarlenQueries(
        kernel=kernel,
        starts=torch.tensor([0, *accumulate(counts)], **int32),
        lengths=torch.tensor([chunk.end for chunk in chunks], **int32),
        tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], **int32),
        longest=max(counts),
    )


def _group(
    chunks: Sequence[ScheduledChunk], cache: KvCache, lengths: KvLengths, rows: Sequence[int]
) -> AttentionGroup:
    """Block tables padded to the longest, and to one of the lengths that agree."""
    size = cache.block_size
    num_blocks = blocks_for(max(chunk.end for chunk in chunks), size)
    while not lengths.agrees(num_blocks * size):
        num_blocks += 1
    flat_blocks: list[int] = []
    for chunk in chunks:
        table = chunk.sequence.block_table[: min(num_blocks, blocks_for(chunk.end, size))]
        flat_blocks += table
        flat_blocks += [cache.scratch_block] * (num_blocks - len(table))
    return AttentionGroup(
        rows=_as_slice(rows, cache.device),
        flat_blocks=torch.tensor(flat_blocks, device=cache.device),
        positions=torch.tensor([range(chunk.start, chunk.end) for chunk in chunks], device=cache.device),
        length=num_blocks * size,
    )


def _as_slice(rows: Sequence[int], device: torch.device) -> torch.Tensor | slice:
    """Rows that follow each other need no gathering."""
    if rows[-1] - rows[0] == len(rows) - 1:  # they ascend
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
