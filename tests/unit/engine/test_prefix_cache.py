"""What is found for which tokens, and that only equal histories are equal."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.block_manager import BlockManager, blocks_for
from services.engine.detokenizer import TextStream
from services.engine.prefix_cache import PrefixCache, PrefixMatch
from services.engine.prefix_digests import PrefixDigests
from services.engine.request import EngineRequest, SamplingParams, SubmitMode
from services.engine.sequence import EngineSequence
from tests.unit.engine.scheduling import TOKENIZER, Bench

SIZE = 4
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class Pool:
    """A prefix cache over blocks of 4 tokens, without a scheduler."""

    def __init__(self) -> None:
        self.blocks = BlockManager(8)
        self.copied: list[tuple[int, int, int]] = []
        self.cache = PrefixCache(self.blocks, SIZE, lambda *copy: self.copied.append(copy))
        self._host = Bench()

    def sequence(self, token_ids: list[int], salt: str = "") -> EngineSequence:
        sampling = SamplingParams()
        request = EngineRequest(
            request_id="r", prompt_token_ids=tuple(token_ids), sampling=sampling, cache_salt=salt
        )
        return EngineSequence(
            request, SubmitMode.LOCAL, self._host, TextStream(TOKENIZER, sampling), arrival=0
        )

    def compute(self, token_ids: list[int], salt: str = "") -> list[int]:
        """Publishes a whole prompt; its block table."""
        sequence = self.sequence(token_ids, salt)
        sequence.block_table = self.blocks.allocate(blocks_for(len(token_ids), SIZE))
        sequence.num_computed_tokens = len(token_ids)
        self.cache.publish(sequence)
        return sequence.block_table

    def find(self, token_ids: list[int], salt: str = "") -> PrefixMatch:
        return self.cache.find(self.sequence(token_ids, salt))


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_a_match_is_a_common_prefix_and_the_last_token_is_always_left(a: list[int], b: list[int]) -> None:
    pool = Pool()
    table = pool.compute(a)
    match = pool.find(b)
    assert match.num_tokens < len(b)
    assert a[: match.num_tokens] == b[: match.num_tokens]
    assert list(match.blocks) == table[: len(match.blocks)]
    num_common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert len(match.blocks) == min(num_common, len(b) - 1) // SIZE, "a full block was missed"
    assert (match.tail is None) or match.tail == table[len(match.blocks)]


@settings(deadline=None)
@given(TOKENS)
def test_the_same_prompt_again_computes_one_token(tokens: list[int]) -> None:
    pool = Pool()
    pool.compute(tokens)
    match = pool.find(tokens)
    assert match.num_tokens == len(tokens) - 1
    assert match.missing is None


def test_another_salt_finds_nothing() -> None:
    pool = Pool()
    pool.compute([1] * 9, salt="tenant a")
    assert pool.find([1] * 9, salt="tenant b").num_tokens == 0
    assert pool.find([1] * 9, salt="tenant a").num_tokens == 8


def test_what_is_being_computed_is_announced_until_it_is_there_or_its_author_is_gone() -> None:
    pool = Pool()
    author, follower = pool.sequence([1] * 9), pool.sequence([1] * 12)
    assert not pool.cache.is_coming(pool.cache.find(follower), follower)
    author.block_table = pool.blocks.allocate(3)
    pool.cache.start(author, pool.cache.find(author))
    assert pool.cache.is_coming(pool.cache.find(follower), follower)
    author.num_computed_tokens = 4
    pool.cache.publish(author)
    match = pool.cache.find(follower)
    assert (match.num_tokens, pool.cache.is_coming(match, follower)) == (4, True)
    pool.cache.forget(author)
    assert not pool.cache.is_coming(match, follower)


def test_a_cache_that_is_off_finds_and_keeps_nothing() -> None:
    pool = Pool()
    pool.cache = PrefixCache(pool.blocks, SIZE, None)
    table = pool.compute([1] * 9)
    assert pool.find([1] * 9) == PrefixMatch()
    pool.blocks.free(table)
    assert pool.blocks.num_cached == 0


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
