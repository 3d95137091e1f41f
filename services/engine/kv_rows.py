"""A KV pool as memory: where the positions of a page lie, and how they are copied out of it and into it.

A page's positions are consecutive, and so are the slots within a block, often those of neighbouring blocks
too. Copied run by run they move twice as fast as slot by slot.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from services.engine.errors import InvalidKvPage
from services.engine.page_range import PageRange

_LARGEST = 1e30  # far above what a model computes, far below where a dot product overflows


class Run(NamedTuple):
    """Slots [slot, slot + num_slots), the first of which holds the page's position `at`."""

    at: int
    slot: int
    num_slots: int


class KvRows:
    """Keys and values, (layers x 2, slots, kv_heads x head_size): a layer's keys, then its values.

    A row of one page is as long as can be that way; a page's bytes are its rows, one after another.
    """

    def __init__(self, data: torch.Tensor, block_size: int) -> None:
        self.data = data
        self.block_size = block_size

    @property
    def num_blocks(self) -> int:
        return self.data.shape[1] // self.block_size

    def runs(self, blocks: Sequence[int], start: int, end: int) -> list[Run]:
        """Where positions [start, end) lie.

        Args:
            blocks: of the positions from the beginning of the block of `start` on.
        """
        size = self.block_size
        first = start - start % size
        edges = [start, *range(first + size, end, size), end]
        runs: list[Run] = []
        for begin, stop in pairwise(edges):
            slot = blocks[(begin - first) // size] * size + begin % size
            if runs and runs[-1].slot + runs[-1].num_slots == slot:
                runs[-1] = runs[-1]._replace(num_slots=runs[-1].num_slots + stop - begin)
            else:
                runs.append(Run(begin - start, slot, stop - begin))
        return runs

    def gather(self, where: PageRange, runs: Sequence[Run], out: torch.Tensor) -> None:
        """Copies a page into (rows, positions, row)."""
        rows = self._layers(where)
        for at, slot, num_slots in runs:
            out[:, at : at + num_slots].copy_(rows[:, slot : slot + num_slots])

    def scatter(self, where: PageRange, runs: Sequence[Run], page: torch.Tensor) -> None:
        """Writes a page of (rows, positions, row)."""
        rows = self._layers(where)
        for at, slot, num_slots in runs:
            rows[:, slot : slot + num_slots].copy_(page[:, at : at + num_slots])

    def copy_from(
        self,
        source: "KvRows",
        where: PageRange,
        source_runs: Sequence[Run],
        runs: Sequence[Run],
    ) -> None:
        """Copies a page out of another pool of the same shape, but for blocks."""
        rows = self._layers(where)
        theirs = source._layers(where)
        for source_slot, slot, num_slots in _overlaps(source_runs, runs):
            rows[:, slot : slot + num_slots].copy_(theirs[:, source_slot : source_slot + num_slots])

    def check_numbers(self, where: PageRange, runs: Sequence[Run]) -> None:
        """Raises InvalidKvPage if a page holds what must not be read."""
        rows = self._layers(where)
        for _, slot, num_slots in runs:
            check_numbers(rows[:, slot : slot + num_slots])

    def pieces(self, where: PageRange, runs: Sequence[Run]) -> Iterator[memoryview]:
        """A page's bytes in order, where they are; on the host."""
        rows = self._layers(where).view(torch.uint8).numpy()
        for row in rows:
            for _, slot, num_slots in runs:
                yield row[slot : slot + num_slots].data.cast("B")

    def _layers(self, where: PageRange) -> torch.Tensor:
        return self.data[2 * where.layer_start : 2 * where.layer_end]


def check_numbers(data: torch.Tensor) -> None:
    """Raises InvalidKvPage for what must not be read, masked or not.

    Args:
        data: (rows, positions, row)
    """
    # Over two dimensions, and one way after the other: several times faster than both at once, or over all.
    least, most = float(data.amin((1, 2)).amin()), float(data.amax((1, 2)).amax())
    if not (least >= -_LARGEST and most <= _LARGEST):  # so written, NaN fails too
        raise InvalidKvPage(f"the page holds NaN or numbers beyond {_LARGEST:g}")


def _overlaps(source: Sequence[Run], target: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
    """Slots there, slots here, and how many, of what lies in one run of each."""
    theirs, ours = iter(source), iter(target)
    a, b = next(theirs, None), next(ours, None)
    while a is not None and b is not None:
        at = max(a.at, b.at)
        end = min(a.at + a.num_slots, b.at + b.num_slots)
        yield a.slot + at - a.at, b.slot + at - b.at, end - at
        a = a if a.at + a.num_slots > end else next(theirs, None)
        b = b if b.at + b.num_slots > end else next(ours, None)
