"""The order in which a prompt asks workers, as pure functions of what is known about them."""

from collections import Counter
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.policy import Candidate, PickOutcome, by_affinity, by_load, prefix_key

BOUND = 1.25
NUM_KEYS = 2000


def idle(name: str, num_requests: int = 0, **changes: object) -> Candidate:
    fields = {
        "address": name,
        "num_requests": num_requests,
        "capacity": 8,
        "share_of_blocks": 0.0,
        "lacks_room": False,
        "last_picked": 0,
    }
    return Candidate(**{**fields, **changes})  # type: ignore[arg-type]


def pool(size: int) -> list[Candidate]:
    return [idle(f"10.0.0.{n}:50051") for n in range(size)]


def key(number: int, salt: str = "") -> bytes:
    found = prefix_key([number] * 16, salt, block_size=16, num_blocks=4)
    assert found is not None
    return found


def first(candidates: list[Candidate], key: bytes) -> str:
    return by_affinity(candidates, key, BOUND).order[0].address


class Cluster:
    """Sends requests that never end, and counts them as a load report would."""

    def __init__(self, size: int, bound: float = BOUND) -> None:
        self.candidates = {candidate.address: candidate for candidate in pool(size)}
        self.bound = bound

    def send(self, key: bytes) -> PickOutcome:
        ranking = by_affinity(list(self.candidates.values()), key, self.bound)
        chosen = ranking.order[0]
        self.candidates[chosen.address] = replace(chosen, num_requests=chosen.num_requests + 1)
        return ranking.outcome

    @property
    def loads(self) -> list[int]:
        return [candidate.num_requests for candidate in self.candidates.values()]


# --- keys


def test_the_key_is_of_the_leading_full_blocks() -> None:
    def of(tokens: list[int], salt: str = "a") -> bytes | None:
        return prefix_key(tokens, salt, block_size=4, num_blocks=2)

    assert of([1, 2, 3]) is None
    assert of([1, 2, 3, 4]) == of([1, 2, 3, 4, 5, 6, 7])
    assert of([1, 2, 3, 4]) != of([1, 2, 3, 4, 5, 6, 7, 8])
    assert of([1, 2, 3, 4, 5, 6, 7, 8]) == of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert of([1, 2, 3, 4]) != of([1, 2, 3, 5])


def test_another_tenant_has_another_key() -> None:
    assert key(1, "a") != key(1, "b")


def test_the_order_is_the_same_in_every_process() -> None:
    """Gateways agree without a word, so it must not hang on Python's hash seed."""
    order = [candidate.address for candidate in by_affinity(pool(4), key(7), BOUND).order]
    assert order == ["10.0.0.3:50051", "10.0.0.2:50051", "10.0.0.0:50051", "10.0.0.1:50051"]


# --- rendezvous


@given(seed=st.integers(0, 2**31), candidates=st.permutations(pool(6)))
def test_one_prefix_has_one_worker_however_the_workers_are_listed(
    seed: int, candidates: list[Candidate]
) -> None:
    ranking = by_affinity(candidates, key(seed), BOUND)
    assert ranking.order[0].address == first(pool(6), key(seed))
    assert ranking.outcome is PickOutcome.AFFINITY


@settings(max_examples=10, deadline=None)
@given(size=st.integers(2, 12), offset=st.integers(0, 2**20))
def test_a_worker_that_comes_takes_about_its_share_and_nothing_moves_between_the_others(
    size: int, offset: int
) -> None:
    before, after = pool(size), pool(size + 1)
    new = after[-1].address
    moves = [
        first(after, key(offset + n))
        for n in range(NUM_KEYS)
        if first(after, key(offset + n)) != first(before, key(offset + n))
    ]
    assert set(moves) == {new}
    share = 1 / (size + 1)
    deviation = (share * (1 - share) / NUM_KEYS) ** 0.5
    assert abs(len(moves) / NUM_KEYS - share) < 6 * deviation


@settings(max_examples=10, deadline=None)
@given(size=st.integers(2, 12), gone=st.integers(0, 11), offset=st.integers(0, 2**20))
def test_a_worker_that_goes_moves_its_own_keys_alone_to_the_next_in_their_order(
    size: int, gone: int, offset: int
) -> None:
    before = pool(size)
    left = [candidate for n, candidate in enumerate(before) if n != gone % size]
    for n in range(300):
        order = by_affinity(before, key(offset + n), BOUND).order
        expected = order[1] if order[0] not in left else order[0]
        assert first(left, key(offset + n)) == expected.address


# --- bounded loads


@given(
    size=st.integers(1, 9),
    bound=st.sampled_from([1.01, 1.25, 2.0]),
    keys=st.lists(st.integers(0, 3), min_size=1, max_size=80),
)
def test_no_worker_takes_more_than_the_bound_however_hot_a_key(
    size: int, bound: float, keys: list[int]
) -> None:
    cluster = Cluster(size, bound)
    for number in keys:
        cluster.send(key(number))
        assert max(cluster.loads) <= ceil(bound * sum(cluster.loads) / size)


def test_a_hot_key_overflows_to_the_next_in_its_order_and_comes_back() -> None:
    order = [candidate.address for candidate in by_affinity(pool(3), key(1), BOUND).order]
    busy = [idle(order[0], 5), idle(order[1]), idle(order[2])]
    overflow = by_affinity(busy, key(1), BOUND)
    assert (overflow.order[0].address, overflow.outcome) == (order[1], PickOutcome.OVERFLOW)
    assert [candidate.address for candidate in overflow.order] == [order[1], order[2], order[0]]
    assert first(pool(3), key(1)) == order[0]


def test_a_larger_worker_takes_a_larger_share() -> None:
    order = [candidate.address for candidate in by_affinity(pool(2), key(1), BOUND).order]
    assert first([idle(order[0], 10, capacity=32), idle(order[1], 4)], key(1)) == order[0]
    assert first([idle(order[0], 10), idle(order[1], 4)], key(1)) == order[1]


def test_a_worker_without_room_is_passed_over() -> None:
    order = [candidate.address for candidate in by_affinity(pool(2), key(1), BOUND).order]
    ranking = by_affinity([idle(order[0], lacks_room=True), idle(order[1])], key(1), BOUND)
    assert (ranking.order[0].address, ranking.outcome) == (order[1], PickOutcome.OVERFLOW)


def test_where_all_are_above_their_bound_the_first_choice_is_no_hit() -> None:
    full = [idle(f"10.0.0.{n}:1", lacks_room=True) for n in range(3)]
    for number in range(20):
        assert by_affinity(full, key(number), BOUND).outcome is PickOutcome.OVERFLOW


def test_without_room_anywhere_the_least_busy_is_taken() -> None:
    full = [idle("a:1", 5, lacks_room=True), idle("b:1", 1, lacks_room=True)]
    assert by_affinity(full, key(1), BOUND).order[0].address == "b:1"


@settings(max_examples=20)
@given(offset=st.integers(0, 2**31))
def test_a_burst_of_different_prompts_spreads(offset: int) -> None:
    cluster = Cluster(4)
    outcomes = Counter(cluster.send(key(offset + n)) for n in range(100))
    assert max(cluster.loads) <= ceil(BOUND * 25)
    assert min(cluster.loads) >= 100 - 3 * ceil(BOUND * 25)
    assert outcomes[PickOutcome.AFFINITY] > 60


# --- load


@pytest.mark.parametrize(
    ("best", "other"),
    [
        (idle("a:1", 3, capacity=16), idle("b:1", 2, capacity=8)),
        (idle("a:1", 7), idle("b:1", 0, lacks_room=True)),
        (idle("a:1", 1, share_of_blocks=0.1), idle("b:1", 1, share_of_blocks=0.2)),
        (idle("a:1", last_picked=4), idle("b:1", last_picked=9)),
    ],
)
def test_the_least_busy_comes_first(best: Candidate, other: Candidate) -> None:
    ranking = by_load([other, best])
    assert ranking.order == (best, other)
    assert ranking.outcome is PickOutcome.LEAST_LOADED
