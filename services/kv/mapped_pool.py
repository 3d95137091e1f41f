"""A prefill worker's KV pool, mapped into another process of the host: pages are read where they were made.

The other end says which blocks a page lies in, and keeps them until it is told that they have been taken, or
the call ends. Nothing it says is trusted: what is read is checked like what comes over the wire, after it has
been copied.
"""

import mmap
import os
import stat

import torch

from baton.v1 import common_pb2
from services.engine.errors import InvalidKvPage
from services.engine.request import ModelIdentity
from services.engine.shared_pool import ID_BYTES
from services.kv import page
from services.kv.page import PageRange


class MappedPool:
    """Read-only. Stays mapped as long as this object lives, also when its owner has died.

    Attributes:
        pool_id: names it in requests.
    """

    def __init__(
        self, pool_id: bytes, memory: mmap.mmap, num_bytes: int, block_size: int, identity: ModelIdentity
    ) -> None:
        self.pool_id = pool_id
        self._block_size = block_size
        self._shape = (identity.num_kv_heads, identity.head_size)
        dtype = page.dtype_of(identity)
        data = torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize)
        # (layers x 2, slots, kv_heads x head_size)
        self._rows = data.view(2 * identity.num_layers, -1, identity.num_kv_heads * identity.head_size)

    def read(self, where: PageRange, blocks: list[int], scratch: torch.Tensor) -> torch.Tensor:
        """A copy of a page, (layers, 2, tokens, kv_heads, head_size), in `scratch` if it fits there.

        Raises InvalidKvPage for blocks that the pool does not have or that do not fit the range.
        """
        size, first = self._block_size, where.token_start // self._block_size
        num_rows, num_slots, row = self._rows.shape
        layers, tokens = where.layer_end - where.layer_start, where.token_end - where.token_start
        if layers < 1 or tokens < 1 or where.layer_end > num_rows // 2:
            raise InvalidKvPage(f"{where} is no page of a shared pool of {num_rows // 2} layers")
        if len(blocks) != -(-where.token_end // size) - first:
            raise InvalidKvPage(f"{len(blocks)} blocks of {size} are not what holds {where}")
        if max(blocks) >= num_slots // size:
            raise InvalidKvPage(f"block {max(blocks)} lies outside the shared pool")
        places = range(where.token_start, where.token_end)
        slots = torch.tensor([blocks[place // size - first] * size + place % size for place in places])
        num_elements = 2 * layers * tokens * row
        fits = num_elements <= len(scratch)
        out = scratch[:num_elements].view(2 * layers, tokens, row) if fits else None
        rows = torch.index_select(self._rows[2 * where.layer_start : 2 * where.layer_end], 1, slots, out=out)
        return rows.view(layers, 2, tokens, *self._shape)


def map_pool(info: common_pb2.WorkerInfo, identity: ModelIdentity) -> MappedPool | None:
    """Maps the pool that a worker offers; None if it offers none, or it cannot be reached from here."""
    offer = info.shared_pool
    unit = page.bytes_per_token_layer(identity) * identity.num_layers * max(1, info.block_size)
    if len(offer.id) != ID_BYTES or not offer.num_bytes or offer.num_bytes % unit or not info.block_size:
        return None
    try:
        # Whatever these numbers mean here, opening it must neither wait nor change anything.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", flags)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != offer.num_bytes + ID_BYTES:
            return None
        if os.pread(fd, ID_BYTES, offer.num_bytes) != offer.id:
            return None
        memory = mmap.mmap(fd, offer.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError:
        return None
    finally:
        os.close(fd)
    return MappedPool(offer.id, memory, offer.num_bytes, info.block_size, identity)
