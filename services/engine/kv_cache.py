"""The KV cache: one pool of slots per layer, addressed through block tables.

Slot `block x block_size + offset` holds the keys and values of one position in every layer.

Invariant: a sequence reads, masked or not, what was computed or imported for its own tokens, and zeros. A
mask does not stop NaN, nor a number whose product with a query overflows, so whoever comes to write only a
part of a block clears the rest first, and `read_page` refuses such numbers.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from services.engine.errors import InvalidKvPage
from services.engine.kv_rows import KvRows, Run, check_numbers
from services.engine.page_range import PageRange
from services.engine.placement import copies_for

# Payloads are views of received messages, which are read-only, and are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of the cache of one model."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """2 (keys and values) x layers x KV heads x head size x element bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.torch_dtype.itemsize


class KvLayer(NamedTuple):
    """Views of one layer's pool: slot by slot (slots, kv_heads, head_size), and block by block."""

    keys: torch.Tensor
    values: torch.Tensor
    key_blocks: torch.Tensor  # (blocks, block_size * kv_heads * head_size)
    value_blocks: torch.Tensor


class KvCache:
    """The pool of one engine, shape (layers, 2, slots, kv_heads, head_size).

    One block more than asked for, `scratch_block`, belongs to nobody: padding rows write there.

    Args:
        memory: where it is to lie, zeros of `pool_bytes` bytes; else it makes room for itself.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.scratch_block = num_blocks
        self.device = device or torch.device("cpu")
        self._copies = copies_for(self.device)
        num_slots = (num_blocks + 1) * block_size
        shape = (layout.num_layers, 2, num_slots, layout.num_kv_heads, layout.head_size)
        if memory is None:
            self._pool = torch.zeros(shape, dtype=layout.torch_dtype, device=self.device)
        else:
            self._pool = memory.view(layout.torch_dtype).view(shape)
        self.layers = [
            KvLayer(*layer, *layer.view(2, num_blocks + 1, -1))  # made once: a view costs like a small sum
            for layer in self._pool
        ]
        self.rows = KvRows(
            self._pool.view(2 * layout.num_layers, -1, layout.num_kv_heads * layout.head_size), block_size
        )

    def slots(self, block_table: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Slots of positions [start, end), shape (end - start,)."""
        size = self.block_size
        return torch.tensor(  # by hand: for as few as a page has, several times faster than with tensors
            [block_table[place // size] * size + place % size for place in range(start, end)],
            dtype=torch.long,
            device=self.device,
        )

    def copy_block(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` positions of a block in every layer; the rest becomes zeros."""
        kept, copy = self._block(source), self._block(target)
        copy[:, :, :count] = kept[:, :, :count]
        copy[:, :, count:] = 0

    def clear_block(self, block: int) -> None:
        """Zeros in every layer."""
        self._block(block).zero_()

    def _block(self, block: int) -> torch.Tensor:
        """A view (layers, 2, block_size, kv_heads, head_size)."""
        return self._pool[:, :, block * self.block_size : (block + 1) * self.block_size]

    @property
    def is_on_host(self) -> bool:
        return self.device.type == "cpu"

    def runs(self, block_table: Sequence[int], where: PageRange) -> list[Run]:
        """Where a page's positions of a sequence lie."""
        blocks = block_table[where.token_start // self.block_size :]
        return self.rows.runs(blocks, where.token_start, where.token_end)

    def export_range(
        self,
        block_table: Sequence[int],
        where: PageRange,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A contiguous copy on the host (layers, 2, tokens, kv_heads, head_size).

        Args:
            out: memory on the host that the copy is to be in, of as many elements.
        """
        layout = self.layout
        shape = (where.num_layers, 2, where.num_tokens, layout.num_kv_heads, layout.head_size)
        runs = self.runs(block_table, where)
        if out is None:
            out = torch.empty(shape, dtype=layout.torch_dtype)
        page = out if self.is_on_host else torch.empty_like(out, device=self.device)
        rows = page.view(2 * shape[0], shape[2], shape[3] * shape[4])
        self.rows.gather(where, runs, rows)
        if page is not out:
            out.copy_(self._copies.to_host(page))
        return out.view(shape)

    def read_page(self, where: PageRange, payload: memoryview) -> torch.Tensor:
        """Bytes laid out as `export_range` gives them, as what `import_range` takes. Raises InvalidKvPage.

        A view on the host where it can be. Needs no lock.
        """
        layout = self.layout
        row = layout.num_kv_heads * layout.head_size
        shape = (2 * where.num_layers, where.num_tokens, row)
        expected = math.prod(shape) * layout.torch_dtype.itemsize
        if len(payload) != expected:
            raise InvalidKvPage(f"payload has {len(payload)} bytes, its ranges need {expected}")
        page = torch.frombuffer(payload, dtype=layout.torch_dtype).view(shape)
        check_numbers(page)
        return page

    def import_range(self, block_table: Sequence[int], where: PageRange, page: torch.Tensor) -> None:
        """Writes a page that `read_page` gave."""
        self.rows.scatter(where, self.runs(block_table, where), self._copies.to_device(page))


def pool_bytes(layout: KvLayout, num_blocks: int, block_size: int) -> int:
    """Size of the pool of a cache of so many blocks."""
    return (num_blocks + 1) * block_size * layout.bytes_per_token


def num_blocks_for(layout: KvLayout, block_size: int, memory_bytes: int, most_tokens: int) -> int:
    """Blocks that fit the budget, and no more than could ever be used at once; at least one."""
    affordable = memory_bytes // (layout.bytes_per_token * block_size)
    return max(1, min(affordable, -(-most_tokens // block_size)))
