"""Who holds which KV block, and what the blocks that nobody holds still contain.

Invariants:
- a block is blank, cached (held by nobody, its content kept under a digest), or held;
- a held block counts its holders; letting go of what is not held raises;
- content that is published never changes: whoever shares a block only reads it.

Blank blocks are given out first, then the cached one that was let go longest ago. Knows numbers and
digests, neither tensors nor tokens.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence


class BlockManager:
    """The pool's blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._blank = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # let go longest ago first
        self._num_holders: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._digests_of: dict[int, list[bytes]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: blank ones and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._num_holders)

    @property
    def num_cached(self) -> int:
        """Blocks whose content is kept although nobody holds them."""
        return len(self._cached)

    def can_allocate(self, count: int, *, sharing: Sequence[int] = ()) -> bool:
        """Whether `share(sharing)` followed by `allocate(count)` would succeed."""
        return count <= self.num_free - sum(block in self._cached for block in sharing)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks for writing, all or none. Raises ValueError unless `can_allocate`.

        In the order of their numbers: neighbours are copied together (`kv_rows.py`).
        """
        if not self.can_allocate(count):
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        blocks = sorted(self._blank.popleft() if self._blank else self._evict() for _ in range(count))
        self._num_holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Becomes one more holder of blocks that `find` gave, for reading."""
        for block in blocks:
            if block not in self._digests_of:
                raise ValueError(f"block {block} has no published content to share")
            self._cached.pop(block, None)
            self._num_holders[block] = self._num_holders.get(block, 0) + 1

    def free(self, blocks: Sequence[int]) -> None:
        """Lets go of one sequence's blocks. Raises ValueError for one that nobody holds.

        The last ones go first, so that of a chain the end is evicted before the beginning.
        """
        for block in reversed(blocks):
            count = self._num_holders.get(block)
            if count is None:
                raise ValueError(f"block {block} is freed twice")
            if count > 1:
                self._num_holders[block] = count - 1
                continue
            del self._num_holders[block]
            if block in self._digests_of:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Makes a held block's content findable; the first of two equal blocks stays the one found."""
        if block not in self._num_holders:
            raise ValueError(f"block {block} is published by nobody who holds it")
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digests_of.setdefault(block, []).append(digest)

    def find(self, digest: bytes) -> int | None:
        """The block with this content, held or cached."""
        return self._block_of.get(digest)

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Nobody finds the blocks any more; those that nobody holds become blank."""
        for block in blocks:
            for digest in self._digests_of.pop(block, ()):
                del self._block_of[digest]
            if block in self._cached:
                del self._cached[block]
                self._blank.append(block)

    def num_holders(self, block: int) -> int:
        return self._num_holders.get(block, 0)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        for digest in self._digests_of.pop(block):
            del self._block_of[digest]
        return block


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` positions."""
    return -(-num_tokens // block_size)
