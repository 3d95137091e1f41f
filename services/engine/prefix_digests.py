"""What a sequence's tokens are called in the prefix cache.

A block's digest covers its tokens and, through its predecessor's digest, every token before them, so equal
digests mean equal keys and values. The salt of the chain's beginning keeps tenants apart: neither content
nor timing of one tenant's prompts can be probed by another. Hence also a cryptographic hash.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

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


@dataclass(slots=True)
class SequencePrefix:
    """How much of one sequence's block table others can find."""

    digests: PrefixDigests
    num_published_blocks: int = 0  # full ones, from the beginning
    has_published_tail: bool = False  # the context's partly filled last block

    def forget(self) -> None:
        """The block table is gone."""
        self.num_published_blocks = 0
        self.has_published_tail = False
