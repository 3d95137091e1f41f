"""Who attends together in a step, and where its new keys and values go."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from services.engine.attention import AttentionGroup, AttentionStep
from services.engine.block_manager import blocks_for
from services.engine.kv_cache import KvCache
from services.engine.kv_lengths import KvLengths
from services.engine.scheduler import ScheduledChunk


def plan_attention(chunks: Sequence[ScheduledChunk], cache: KvCache, lengths: KvLengths) -> AttentionStep:
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
    return AttentionStep(cache, torch.tensor(new_slots), groups)


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
        flat_blocks += [0] * (num_blocks - len(table))
    return AttentionGroup(
        rows=_as_slice(rows),
        flat_blocks=torch.tensor(flat_blocks),
        positions=torch.tensor([range(chunk.start, chunk.end) for chunk in chunks]),
        length=num_blocks * size,
    )


def _as_slice(rows: Sequence[int]) -> torch.Tensor | slice:
    """Rows that follow each other need no gathering."""
    if rows[-1] - rows[0] == len(rows) - 1:  # they ascend
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)
