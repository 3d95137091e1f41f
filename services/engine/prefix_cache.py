"""Sequences use the KV cache that others have computed for the same tokens, or are computing.

Full blocks are shared. A partly filled last block, which each sequence goes on to write, is copied instead:
that costs what copy-on-write would (all but one holder of a shared tail would have to copy it in their first
step anyway) and leaves no block that two sequences may write.

Knows blocks and digests; not when a sequence is let in.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.block_manager import BlockManager
from services.engine.sequence import EngineSequence


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache holds of a sequence's tokens, short of the last one, whose logits are needed.

    Attributes:
        blocks: full blocks to share, in order.
        tail: a block whose first positions continue them, to be copied; None if there is none.
        num_tokens: positions that both cover.
        missing: digest of the first block that was not found; None if nothing is missing.
    """

    blocks: tuple[int, ...] = ()
    tail: int | None = None
    num_tokens: int = 0
    missing: bytes | None = None


class PrefixCache:
    """Finds, takes and publishes.

    Args:
        copy_block: copies of one block (first) into another as many positions as the third says; None
            turns the cache off.
    """

    def __init__(
        self, blocks: BlockManager, block_size: int, copy_block: Callable[[int, int, int], None] | None
    ) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._copy_block = copy_block
        self._authors: dict[bytes, EngineSequence] = {}  # of blocks that are being computed

    def find(self, sequence: EngineSequence) -> PrefixMatch:
        """The longest cached prefix of the sequence's tokens but the last."""
        if self._copy_block is None:
            return PrefixMatch()
        digests, token_ids = sequence.prefix.digests, sequence.token_ids
        usable = len(token_ids) - 1
        found: list[int] = []
        for digest in digests.full_blocks(token_ids, usable):
            block = self._blocks.find(digest)
            if block is None:
                return PrefixMatch(tuple(found), None, len(found) * self._block_size, digest)
            found.append(block)
        covered = len(found) * self._block_size
        if covered == usable:
            return PrefixMatch(tuple(found), None, covered, None)
        last = digests.last_block(token_ids, len(token_ids))
        tail = self._blocks.find(last)
        if tail is None:
            return PrefixMatch(tuple(found), None, covered, last)
        return PrefixMatch(tuple(found), tail, usable, None)

    def awaited(self, match: PrefixMatch, sequence: EngineSequence) -> EngineSequence | None:
        """Who is computing the block where the match of a sequence ends.

        Nobody of lower priority: those in between, who go first, could hold it up without end.
        """
        author = None if match.missing is None else self._authors.get(match.missing)
        if author is None or author.request.priority < sequence.request.priority:
            return None
        return author

    def is_coming(self, match: PrefixMatch, sequence: EngineSequence) -> bool:
        """Whether somebody is computing the block where the match of a sequence ends."""
        return self.awaited(match, sequence) is not None

    def take(self, sequence: EngineSequence, match: PrefixMatch) -> None:
        """Takes over a match whose blocks the sequence shares; what it writes behind is its to publish.

        Copies the tail at once: it may be evicted next, or be the very block that it is copied to.
        """
        num_shared = len(match.blocks)
        if match.tail is not None:
            assert self._copy_block is not None
            count = match.num_tokens - num_shared * self._block_size
            self._copy_block(match.tail, sequence.block_table[num_shared], count)
        sequence.prefix.num_published_blocks = num_shared

    def start(self, sequence: EngineSequence, num_tokens: int) -> None:
        """The sequence computes what follows the `num_tokens` that it has taken; others may wait for it."""
        if self._copy_block is None:
            return
        sequence.start_after_prefix(num_tokens)
        for digest in self._context_digests(sequence)[sequence.prefix.num_published_blocks :]:
            author = self._authors.get(digest)
            if author is not None and author.request.priority >= sequence.request.priority:
                continue
            if self._blocks.find(digest) is None:
                self._authors[digest] = sequence

    def publish(self, sequence: EngineSequence) -> None:
        """Makes findable what the sequence has filled up to `num_computed_tokens`."""
        if self._copy_block is None:
            return
        prefix, size = sequence.prefix, self._block_size
        num_full = sequence.num_computed_tokens // size
        if num_full > prefix.num_published_blocks:
            digests = prefix.digests.full_blocks(sequence.token_ids, sequence.num_computed_tokens)
            for number in range(prefix.num_published_blocks, num_full):
                self._publish(sequence.block_table[number], digests[number])
            prefix.num_published_blocks = num_full
        # For choices and retries, which have the same context.
        context = sequence.request.num_context_tokens
        if context % size and sequence.num_computed_tokens >= context and not prefix.has_published_tail:
            self._publish(sequence.block_table[context // size], self._context_digests(sequence)[-1])
            prefix.has_published_tail = True

    def forget(self, sequence: EngineSequence) -> None:
        """The sequence has lost its blocks: it will publish nothing more."""
        sequence.prefix.forget()
        for digest in [digest for digest, author in self._authors.items() if author is sequence]:
            del self._authors[digest]

    def _publish(self, block: int, digest: bytes) -> None:
        self._blocks.publish(block, digest)
        self._authors.pop(digest, None)

    def _context_digests(self, sequence: EngineSequence) -> list[bytes]:
        """Of every block of the context, the partly filled last one included."""
        digests, context = sequence.prefix.digests, sequence.request.num_context_tokens
        full = digests.full_blocks(sequence.token_ids, context)
        if context % self._block_size:
            full.append(digests.last_block(sequence.token_ids, context))
        return full
