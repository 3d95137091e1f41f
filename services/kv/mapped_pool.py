"""A prefill worker's KV pool, mapped into another process of the host: pages are read where they were made.

The other end says which blocks a page lies in, and keeps them until it is told that they have been taken, or
the call ends. Nothing it says is trusted: what is read is checked like what comes over the wire, after it has
been copied.
"""

import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from baton.v1 import common_pb2
from services.engine.errors import InvalidKvPage
from services.engine.kv_rows import KvRows
from services.engine.page_range import PageRange
from services.engine.request import ModelIdentity
from services.engine.shared_pool import ID_BYTES
from services.kv import page


class MappedPool:
    """Read-only. Stays mapped as long as this object lives, also when its owner has died.

    Attributes:
        pool_id: names it in requests.
        rows: the memory.
    """

    def __init__(
        self, pool_id: bytes, memory: mmap.mmap, num_bytes: int, block_size: int, identity: ModelIdentity
    ) -> None:
        self.pool_id = pool_id
        dtype = page.dtype_of(identity)
        data = torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize)
        row = identity.num_kv_heads * identity.head_size
        self.rows = KvRows(data.view(2 * identity.num_layers, -1, row), block_size)

    def check(self, where: PageRange, blocks: Sequence[int]) -> None:
        """Raises InvalidKvPage for blocks that the pool does not have, or that cannot hold this page."""
        size, num_layers = self.rows.block_size, self.rows.data.shape[0] // 2
        if not (where.layer_start < where.layer_end <= num_layers and where.token_start < where.token_end):
            raise InvalidKvPage(f"{where} is no page of a shared pool of {num_layers} layers")
        if len(blocks) != -(-where.token_end // size) - where.token_start // size:
            raise InvalidKvPage(f"{len(blocks)} blocks of {size} are not what holds {where}")
        if max(blocks) >= self.rows.num_blocks:
            raise InvalidKvPage(f"block {max(blocks)} lies outside the shared pool")


def map_pool(info: common_pb2.WorkerInfo, identity: ModelIdentity) -> MappedPool | None:
    """Maps the pool that a worker offers; None if it offers none, or it cannot be reached from here."""
    offer = info.shared_pool
    unit = page.bytes_per_token_layer(identity) * identity.num_layers * max(1, info.block_size)
    if len(offer.id) != ID_BYTES or not offer.num_bytes or offer.num_bytes % unit or not info.block_size:
        return None
    try:
        with _opened(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_PATH) as place:
            if not stat.S_ISREG(os.fstat(place).st_mode):  # opening a device may do something
                return None
            with _opened(f"/proc/self/fd/{place}", os.O_RDONLY) as fd:
                if os.fstat(fd).st_size != offer.num_bytes + ID_BYTES:
                    return None
                if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:  # reading it could kill us
                    return None
                if os.pread(fd, ID_BYTES, offer.num_bytes) != offer.id:
                    return None
                memory = mmap.mmap(fd, offer.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    return MappedPool(offer.id, memory, offer.num_bytes, info.block_size, identity)


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
