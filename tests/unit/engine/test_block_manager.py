"""Blocks are blank, cached or held, whatever comes in whatever order; shared ones are never written."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engine.block_manager import BlockManager, blocks_for

NUM_BLOCKS = 12


class BlockMachine(RuleBasedStateMachine):
    """Sequences that come, publish, share and go, against a naive account of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.writable: list[set[int]] = []  # of each table: allocated by it and not published
        self.content: dict[bytes, int] = {}  # what was published last under a digest, and where

    @rule(count=st.integers(0, 5), sharing=st.integers(0, 4))
    def admit(self, count: int, sharing: int) -> None:
        found = [block for block in map(self.manager.find, self.content) if block is not None][:sharing]
        shared = list(dict.fromkeys(found))
        if not self.manager.can_allocate(count, sharing=shared):
            self.manager.share(shared)
            with pytest.raises(ValueError, match="wanted"):
                self.manager.allocate(count)
            self.manager.free(shared)
            return
        self.manager.share(shared)
        fresh = self.manager.allocate(count)
        assert not set(fresh) & {block for table in self.tables for block in table}
        self.tables.append([*shared, *fresh])
        self.writable.append(set(fresh))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100), digest=st.integers(0, 20))
    def publish(self, which: int, digest: int) -> None:
        number = which % len(self.tables)
        if self.writable[number]:
            block = self.writable[number].pop()
            name = bytes([digest])
            known = self.manager.find(name)
            self.manager.publish(block, name)
            assert self.manager.find(name) == (block if known is None else known)
            self.content.setdefault(name, block)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        number = which % len(self.tables)
        self.writable.pop(number)
        self.manager.free(self.tables.pop(number))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def unpublish(self, which: int) -> None:
        table = self.tables[which % len(self.tables)]
        found = {name: self.manager.find(name) for name in self.content}
        self.manager.unpublish(table)
        for name, block in found.items():
            assert self.manager.find(name) == (None if block in table else block)

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        held = [block for table in self.tables for block in table]
        assert self.manager.num_used == len(set(held))
        assert self.manager.num_used + self.manager.num_free == NUM_BLOCKS
        assert self.manager.num_cached <= self.manager.num_free
        for block in range(NUM_BLOCKS):
            assert self.manager.num_holders(block) == held.count(block)

    @invariant()
    def nobody_shares_what_somebody_may_write(self) -> None:
        for writable in self.writable:
            for block in writable:
                assert self.manager.num_holders(block) == 1


BlockMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


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


def test_what_was_let_go_longest_ago_is_evicted_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    manager = BlockManager(4)
    old, new = manager.allocate(2), manager.allocate(2)
    for block in (*old, *new):
        manager.publish(block, bytes([block]))
    manager.free(old)
    manager.free(new)
    assert (manager.num_cached, manager.num_free) == (4, 4)
    assert [manager.allocate(1) for _ in range(3)] == [[old[1]], [old[0]], [new[1]]]
    assert manager.find(bytes([new[0]])) == new[0]
    assert manager.find(bytes([old[0]])) is None


def test_blocks_are_given_out_in_the_order_of_their_numbers() -> None:
    manager = BlockManager(6)
    first, second = manager.allocate(3), manager.allocate(3)
    manager.free(second)
    manager.free(first)
    blocks = manager.allocate(5)
    assert blocks == sorted(blocks)


def test_what_is_no_longer_published_is_blank_once_nobody_holds_it() -> None:
    manager = BlockManager(2)
    table = manager.allocate(2)
    for block in table:
        manager.publish(block, bytes([block]))
    manager.free(table[:1])
    manager.unpublish(table)
    assert (manager.num_cached, manager.num_free, manager.num_used) == (0, 1, 1)
    manager.free(table[1:])
    assert (manager.num_cached, manager.num_free) == (0, 2)


def test_blank_blocks_are_taken_before_cached_ones() -> None:
    manager = BlockManager(2)
    (block,) = manager.allocate(1)
    manager.publish(block, b"a")
    manager.free([block])
    assert manager.allocate(1) != [block]
    assert manager.find(b"a") == block


def test_a_shared_block_outlives_the_first_to_let_go() -> None:
    manager = BlockManager(2)
    table = manager.allocate(1)
    with pytest.raises(ValueError, match="no published content"):
        manager.share(table)
    manager.publish(table[0], b"a")
    manager.share(table)
    manager.free(table)
    assert (manager.num_used, manager.num_cached) == (1, 0)
    manager.free(table)
    assert (manager.num_used, manager.num_cached) == (0, 1)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
