"""Whoever is given a part of a block reads nothing of its owner before."""

import torch

from services.engine.kv_cache import KvCache, KvLayout
from services.engine.page_range import PageRange

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_size=3)


def test_a_copy_takes_no_more_than_it_was_told_to() -> None:
    cache = KvCache(LAYOUT, num_blocks=3, block_size=4)
    everywhere = PageRange(0, LAYOUT.num_layers, 0, 4)
    source = torch.full((2, 2, 4, 2, 3), 7.0)
    source[:, :, 3] = 9.0
    page = cache.read_page(everywhere, memoryview(source.numpy().tobytes()))
    cache.import_range([1], everywhere, page)
    for layer in cache.layers:
        layer.keys[:4] = torch.nan  # block 0, of an owner before
    cache.copy_block(1, 0, 3)
    source[:, :, 3] = 0.0
    assert torch.equal(cache.export_range([0], everywhere), source)
    assert float(cache.export_range([2], everywhere).abs().max()) == 0.0


def test_clearing_leaves_the_blocks_beside_alone() -> None:
    cache = KvCache(LAYOUT, num_blocks=3, block_size=4)
    for layer in cache.layers:
        layer.keys[:] = layer.values[:] = 1.0
    cache.clear_block(1)
    sums = [float(cache.export_range([block], PageRange(0, 2, 0, 4)).sum()) for block in range(3)]
    assert sums == [96.0, 0.0, 96.0]
