"""Pages are copied run by run as they would be slot by slot, wherever their blocks lie."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.engine.errors import InvalidKvPage
from services.engine.kv_rows import KvRows, Run, check_numbers
from services.engine.page_range import PageRange

NUM_LAYERS, NUM_SLOTS, ROW = 3, 60, 2


def make_rows(block_size: int, seed: int) -> KvRows:
    generator = torch.Generator().manual_seed(seed)
    return KvRows(torch.randn(2 * NUM_LAYERS, NUM_SLOTS, ROW, generator=generator), block_size)


def slots(blocks: Sequence[int], block_size: int, start: int, end: int) -> list[int]:
    """One by one; `blocks` begin with that of `start`."""
    first = start // block_size
    return [
        blocks[place // block_size - first] * block_size + place % block_size for place in range(start, end)
    ]


@st.composite
def tables(draw: st.DrawFn, start: int, end: int) -> tuple[int, list[int]]:
    """A block size, and distinct blocks for these positions, some of them neighbours."""
    size = draw(st.sampled_from([1, 2, 3, 5, 6, 10]))
    needed = -(-end // size) - start // size
    order = draw(
        st.one_of(st.permutations(range(NUM_SLOTS // size)), st.just(list(range(NUM_SLOTS // size))))
    )
    return size, list(order)[:needed]


@given(st.data())
def test_runs_copy_what_slots_would(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 19))
    end = data.draw(st.integers(start + 1, 20))
    layer = data.draw(st.integers(0, NUM_LAYERS - 1))
    where = PageRange(layer, data.draw(st.integers(layer + 1, NUM_LAYERS)), start, end)
    (size, blocks), (own_size, own_blocks) = data.draw(tables(start, end)), data.draw(tables(start, end))
    source, target = make_rows(size, 1), make_rows(own_size, 2)
    before = target.data.clone()
    runs, own_runs = source.runs(blocks, start, end), target.runs(own_blocks, start, end)
    page = source.data[2 * where.layer_start : 2 * where.layer_end, slots(blocks, size, start, end)]

    gathered = torch.empty(2 * where.num_layers, where.num_tokens, ROW)
    source.gather(where, runs, gathered)
    assert torch.equal(gathered, page)
    assert b"".join(source.pieces(where, runs)) == page.contiguous().numpy().tobytes()

    expected = before.clone()
    expected[2 * where.layer_start : 2 * where.layer_end, slots(own_blocks, own_size, start, end)] = page
    target.copy_from(source, where, runs, own_runs)
    assert torch.equal(target.data, expected)
    target.data.copy_(before)
    target.scatter(where, own_runs, page)
    assert torch.equal(target.data, expected)


def test_neighbouring_blocks_make_one_run() -> None:
    rows = make_rows(4, 0)
    assert rows.runs([3, 4, 5, 1], 6, 19) == [Run(0, 14, 10), Run(10, 4, 3)]
    assert rows.runs([3], 6, 7) == [Run(0, 14, 1)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 2e30, -2e30])
@pytest.mark.parametrize(("row", "slot"), [(0, 0), (3, 5), (5, 7)])
def test_what_is_no_number_is_refused(bad: float, row: int, slot: int) -> None:
    source = make_rows(4, 0)
    runs = source.runs([0, 1], 0, 8)
    check_numbers(source.data)
    source.data[row, slot] = bad
    with pytest.raises(InvalidKvPage):
        check_numbers(source.data)
    with pytest.raises(InvalidKvPage):
        source.check_numbers(PageRange(0, 3, 0, 8), runs)
