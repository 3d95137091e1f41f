"""A pool is read by who may map it, as it is, and by nobody else; nobody but its owner writes to it."""

import mmap
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import common_pb2
from services.engine.errors import InvalidKvPage
from services.engine.kv_cache import KvCache, KvLayout, pool_bytes
from services.engine.page_range import PageRange
from services.engine.request import ModelIdentity
from services.engine.shared_pool import ID_BYTES, SharedPool
from services.kv.mapped_pool import MappedPool, map_pool

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_size=4)
NUM_BLOCKS, BLOCK_SIZE = 7, 4
TABLE = [5, 1, 6, 2]
IDENTITY = ModelIdentity(
    model="m",
    fingerprint="f",
    dtype="float32",
    num_layers=3,
    num_kv_heads=2,
    head_size=4,
    rope="",
    wire_version=3,
)


class Owner:
    """A cache in a shared pool, filled with numbers."""

    def __init__(self) -> None:
        self.pool = SharedPool(pool_bytes(LAYOUT, NUM_BLOCKS, BLOCK_SIZE))
        self.cache = KvCache(LAYOUT, NUM_BLOCKS, BLOCK_SIZE, memory=self.pool.tensor())
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        offer = self.pool.offer
        self.info = common_pb2.WorkerInfo(
            block_size=BLOCK_SIZE,
            shared_pool=common_pb2.SharedPool(
                id=offer.pool_id, pid=offer.pid, fd=offer.fd, num_bytes=offer.num_bytes
            ),
        )

    def mapped(self) -> MappedPool:
        mapped = map_pool(self.info, IDENTITY)
        assert mapped is not None
        return mapped


@pytest.fixture(scope="module")
def owner() -> Owner:
    return Owner()


def read(mapped: MappedPool, where: PageRange, blocks: list[int]) -> torch.Tensor:
    """(layers, 2, tokens, kv_heads, head_size)"""
    mapped.check(where, blocks)
    runs = mapped.rows.runs(blocks, where.token_start, where.token_end)
    data = b"".join(mapped.rows.pieces(where, runs))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(
        where.num_layers, 2, where.num_tokens, 2, 4
    )


@given(st.data())
def test_what_is_read_is_what_the_owner_has(owner: Owner, data: st.DataObject) -> None:
    layer, token = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 15))
    where = PageRange(
        layer, data.draw(st.integers(layer + 1, 3)), token, data.draw(st.integers(token + 1, 16))
    )
    blocks = TABLE[where.token_start // BLOCK_SIZE : -(-where.token_end // BLOCK_SIZE)]
    assert torch.equal(read(owner.mapped(), where, blocks), owner.cache.export_range(TABLE, where))


def test_what_the_owner_writes_is_seen_and_outlives_it() -> None:
    owner = Owner()
    mapped = owner.mapped()
    owner.cache.layers[0].keys.fill_(7.0)
    owner.pool.close()
    owner.pool.close()
    assert map_pool(owner.info, IDENTITY) is None
    del owner
    assert read(mapped, PageRange(0, 1, 0, 4), [1])[0, 0].unique().tolist() == [7.0]


@pytest.mark.parametrize(
    "change",
    [
        {"id": bytes(ID_BYTES)},
        {"id": b""},
        {"fd": 1_000_000},
        {"pid": 2**31},
        {"num_bytes": 0},
        {"num_bytes": 3 * 2 * 2 * 4 * 4 * BLOCK_SIZE},
    ],
    ids=str,
)
def test_what_is_not_the_offered_pool_is_not_mapped(owner: Owner, change: dict[str, object]) -> None:
    info = common_pb2.WorkerInfo()
    info.CopyFrom(owner.info)
    for name, value in change.items():
        setattr(info.shared_pool, name, value)
    assert map_pool(info, IDENTITY) is None


def test_a_worker_without_a_pool_offers_none() -> None:
    assert map_pool(common_pb2.WorkerInfo(block_size=4), IDENTITY) is None


def test_numbers_that_mean_something_else_here_do_no_harm(owner: Owner, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"short")
    for path in (tmp_path / "fifo", tmp_path / "file", tmp_path, Path(os.devnull)):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        info = common_pb2.WorkerInfo()
        info.CopyFrom(owner.info)
        info.shared_pool.fd = fd
        assert map_pool(info, IDENTITY) is None
        os.close(fd)


def test_what_can_be_shortened_is_not_mapped(owner: Owner, tmp_path: Path) -> None:
    """Whoever reads a page that is no longer there is killed."""
    offer = owner.pool.offer
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for fd in (unsealed, file):
        os.ftruncate(fd, offer.num_bytes + ID_BYTES)
        os.pwrite(fd, offer.pool_id, offer.num_bytes)
        info = common_pb2.WorkerInfo()
        info.CopyFrom(owner.info)
        info.shared_pool.fd = fd
        assert map_pool(info, IDENTITY) is None
        os.close(fd)


def test_nobody_else_writes_or_shortens_it(owner: Owner) -> None:
    offer = owner.pool.offer
    fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, offer.num_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("where", "blocks"),
    [
        (PageRange(0, 3, 0, 4), []),
        (PageRange(0, 3, 0, 4), [1, 2]),
        (PageRange(0, 3, 3, 5), [1]),
        (PageRange(0, 3, 0, 4), [NUM_BLOCKS + 1]),
        (PageRange(0, 3, 0, 4), [2**32 - 1]),
        (PageRange(0, 4, 0, 4), [1]),
        (PageRange(2, 2, 0, 4), [1]),
        (PageRange(2, 1, 0, 4), [1]),
        (PageRange(0, 3, 4, 4), [1]),
        (PageRange(0, 3, 4, 0), [1]),
    ],
    ids=str,
)
def test_blocks_that_cannot_be_a_page_are_refused(owner: Owner, where: PageRange, blocks: list[int]) -> None:
    with pytest.raises(InvalidKvPage):
        owner.mapped().check(where, blocks)
