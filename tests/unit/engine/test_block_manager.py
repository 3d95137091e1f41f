import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.block_manager import BlockManager, blocks_for


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=60))
def test_no_block_is_lost_or_held_twice(moves: list[tuple[bool, int]]) -> None:
    manager = BlockManager(16)
    held: list[list[int]] = []
    for takes, count in moves:
        if takes and manager.can_allocate(count):
            held.append(manager.allocate(count))
        elif held:
            manager.free(held.pop(count % len(held)))
        blocks = [block for table in held for block in table]
        assert len(blocks) == len(set(blocks)) == manager.num_used
        assert manager.num_free + manager.num_used == 16


def test_allocation_is_all_or_nothing() -> None:
    manager = BlockManager(4)
    manager.allocate(3)
    with pytest.raises(ValueError, match="1 free"):
        manager.allocate(2)
    assert manager.num_free == 1


def test_freeing_twice_raises() -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(2)
    manager.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        manager.free(blocks)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
