"""Finds the KV cache that an earlier sequence has left, or another one is using, for the same tokens.

A block's digest covers its tokens and, through its predecessor's digest, every token before them, so equal
digests mean equal keys and values. Full blocks are shared. A partly filled last block, which each sequence
goes on to write, is copied instead: that costs what copy-on-write would (all but one holder of a shared tail
would have to copy it in their first step anyway) and leaves no block that two sequences may write.

The salt of the chain's first digest keeps tenants apart: neither content nor timing of one tenant's prompts
can be probed by another. Hence also a cryptographic hash.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from services.engine.block_manager import BlockManager

_DIGEST_BYTES = 16


class PrefixDigests:
    """The chain of one sequence, extended as its tokens become known."""

    def __init__(self, salt: str, block_size: int) -> None:
        self._block_size = block_size
        self._root = blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
        self._full: list[bytes] = []

    def full_blocks(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Digests of the full blocks within the first `num_tokens` tokens."""
        count = num_tokens // self._block_size
        while len(self._full) < count:
            start = len(self._full) * self._block_size
            self._full.append(self._digest(token_ids, start, start + self._block_size))
        return self._full[:count]

    def last_block(self, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """Digest of the block, full or not, that ends with token `num_tokens - 1`."""
        full = self.full_blocks(token_ids, num_tokens)
        start = len(full) * self._block_size
        return full[-1] if start == num_tokens else self._digest(token_ids, start, num_tokens)

    def _digest(self, token_ids: Sequence[int], start: int, end: int) -> bytes:
        number = start // self._block_size
        parent = self._full[number - 1] if number else self._root
        tokens = array("I", token_ids[start:end]).tobytes()
        return blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()


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


NO_MATCH = PrefixMatch()


def find_prefix(
    blocks: BlockManager, digests: PrefixDigests, token_ids: Sequence[int], block_size: int
) -> PrefixMatch:
    """The longest cached prefix of the tokens but the last."""
    usable = len(token_ids) - 1
    found: list[int] = []
    for digest in digests.full_blocks(token_ids, usable):
        block = blocks.find(digest)
        if block is None:
            return PrefixMatch(tuple(found), None, len(found) * block_size, digest)
        found.append(block)
    covered = len(found) * block_size
    if covered == usable:
        return PrefixMatch(tuple(found), None, covered, None)
    last = digests.last_block(token_ids, len(token_ids))
    tail = blocks.find(last)
    if tail is None:
        return PrefixMatch(tuple(found), None, covered, last)
    return PrefixMatch(tuple(found), tail, usable, None)
