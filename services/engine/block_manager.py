"""Who holds which KV block.

Invariant: a block is either free or belongs to exactly one sequence; freeing what is not held raises.
Knows numbers, not tensors.
"""

from collections import deque
from collections.abc import Iterable


class BlockManager:
    """The pool's blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, all or none. Raises ValueError unless `can_allocate`."""
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Gives blocks back. Raises ValueError for one that nobody holds."""
        for block in blocks:
            if block not in self._used:
                raise ValueError(f"block {block} is freed twice")
            self._used.remove(block)
            self._free.append(block)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)
