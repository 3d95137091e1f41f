"""What is found for which tokens, and that only equal histories are equal."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.engine.block_manager import BlockManager
from services.engine.prefix_cache import PrefixDigests, PrefixMatch, find_prefix

SIZE = 4
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


def remember(manager: BlockManager, token_ids: list[int], salt: str = "") -> list[int]:
    """Publishes a whole sequence, its partly filled last block too."""
    digests = PrefixDigests(salt, SIZE)
    table = manager.allocate(-(-len(token_ids) // SIZE))
    for block, digest in zip(table, digests.full_blocks(token_ids, len(token_ids)), strict=False):
        manager.publish(block, digest)
    manager.publish(table[-1], digests.last_block(token_ids, len(token_ids)))
    return table


def find(manager: BlockManager, token_ids: list[int], salt: str = "") -> PrefixMatch:
    return find_prefix(manager, PrefixDigests(salt, SIZE), token_ids, SIZE)


@given(TOKENS, TOKENS)
def test_a_match_is_a_common_prefix_and_the_last_token_is_always_left(a: list[int], b: list[int]) -> None:
    manager = BlockManager(8)
    table = remember(manager, a)
    match = find(manager, b)
    assert match.num_tokens < len(b)
    assert a[: match.num_tokens] == b[: match.num_tokens]
    assert list(match.blocks) == table[: len(match.blocks)]
    num_common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert len(match.blocks) == min(num_common, len(b) - 1) // SIZE, "a full block was missed"
    assert (match.tail is None) or match.tail == table[len(match.blocks)]


@given(TOKENS)
def test_the_same_prompt_again_computes_one_token(tokens: list[int]) -> None:
    manager = BlockManager(8)
    remember(manager, tokens)
    match = find(manager, tokens)
    assert match.num_tokens == len(tokens) - 1
    assert match.missing is None


def test_another_salt_finds_nothing() -> None:
    manager = BlockManager(8)
    remember(manager, [1] * 9, salt="tenant a")
    assert find(manager, [1] * 9, salt="tenant b").num_tokens == 0
    assert find(manager, [1] * 9, salt="tenant a").num_tokens == 8


def test_equal_blocks_behind_different_ones_are_different() -> None:
    first, second = PrefixDigests("", SIZE), PrefixDigests("", SIZE)
    ends = [first.full_blocks([1] * 4 + [7] * 4, 8)[1], second.full_blocks([2] * 4 + [7] * 4, 8)[1]]
    assert ends[0] != ends[1]


def test_digests_do_not_depend_on_when_they_were_asked_for() -> None:
    tokens = list(range(40))
    slowly = PrefixDigests("", SIZE)
    chains = [slowly.full_blocks(tokens, n) for n in range(41)]
    assert chains[-1] == PrefixDigests("", SIZE).full_blocks(tokens, 40)
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(chains))
