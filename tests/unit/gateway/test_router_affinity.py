"""Prompts that begin alike go to one worker of each role, as long as that is no worse than spreading them."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import ceil

import pytest

from baton.v1 import common_pb2
from gateway.errors import Unavailable
from gateway.router import Router
from gateway.routing.policy import Affinity
from tests.fake_decode import FakeWorker, running
from tests.waiting import eventually

BLOCK = 16
AFFINITY = Affinity()


def prompt(number: int, num_tokens: int = 100) -> list[int]:
    return [number] * num_tokens


@asynccontextmanager
async def routing(
    num_decode: int, num_prefill: int = 0, affinity: Affinity | None = AFFINITY
) -> AsyncIterator[tuple[Router, Counter[tuple[str, str]], tuple[FakeWorker, ...]]]:
    """The router stops seeing time pass once it runs, so that what it sent stays on its way."""
    workers = (
        *(FakeWorker() for _ in range(num_decode)),
        *(FakeWorker(role=common_pb2.ROLE_PREFILL) for _ in range(num_prefill)),
    )
    picks: Counter[tuple[str, str]] = Counter()
    async with running(*workers):
        router = Router(
            [worker.address for worker in workers[:num_decode]],
            [worker.address for worker in workers[num_decode:]],
            affinity=affinity,
            on_pick=lambda role, outcome: picks.update([(role, outcome)]),
            clock=lambda: 0.0,
        )
        await router.start()
        try:
            await eventually(lambda: all(router.heard_at(w.address) is not None for w in workers))
            yield router, picks, workers
        finally:
            await router.close()


@asynccontextmanager
async def routed(workers: Sequence[FakeWorker]) -> AsyncIterator[Router]:
    """Another gateway's router of the same decode workers, listed the other way round."""
    router = Router([worker.address for worker in reversed(workers)], clock=lambda: 0.0)
    await router.start()
    try:
        await eventually(lambda: all(router.heard_at(w.address) is not None for w in workers))
        yield router
    finally:
        await router.close()


async def test_two_routers_agree_without_having_talked() -> None:
    async with routing(4) as (one, _, workers), routed(workers) as other:
        for number in range(20):
            assert one.route(prompt(number)).decode.address == other.route(prompt(number)).decode.address


async def test_both_roles_follow_the_prefix_and_the_tenant() -> None:
    async with routing(5, 5) as (router, picks, _):
        first = {}
        for number in range(4):
            for salt in ("a", "b"):
                route = router.route(prompt(number), salt=salt)
                first[number, salt] = route.decode.address
                assert len(route.prefill_targets) == 5
        assert any(first[number, "a"] != first[number, "b"] for number in range(4))
        assert picks["decode", "affinity"] + picks["decode", "overflow"] == 8
        assert picks["prefill", "affinity"] + picks["prefill", "overflow"] == 8


async def test_a_prompt_below_one_block_goes_by_load() -> None:
    async with routing(3) as (router, picks, workers):
        named = Counter(router.route(prompt(1, BLOCK - 1)).decode.address for _ in range(9))
        assert named == {worker.address: 3 for worker in workers}
        assert picks == {("decode", "least_loaded"): 9}


async def test_a_hot_prefix_stays_within_its_bound() -> None:
    async with routing(3) as (router, picks, workers):
        named: Counter[str] = Counter()
        for sent in range(1, 31):
            named[router.route(prompt(1)).decode.address] += 1
            assert max(named.values()) <= ceil(1.25 * sent / len(workers))
        assert picks["decode", "affinity"] > 10
        assert picks["decode", "overflow"] > 0


async def test_a_burst_of_different_prompts_spreads() -> None:
    async with routing(3) as (router, _, workers):
        named = Counter(router.route(prompt(number)).decode.address for number in range(30))
        assert set(named) == {worker.address for worker in workers}
        assert max(named.values()) <= ceil(1.25 * 10)


async def test_a_continuation_goes_where_its_prompt_is_and_never_to_one_that_was_tried() -> None:
    short = prompt(1, BLOCK)  # its key is that of one block, whatever was generated since
    async with routing(4) as (one, _, workers), routed(workers) as other:
        tried: list[str] = []
        for _ in workers:
            fresh = one.route(short, exclude=tried).decode.address
            assert other.route(short, num_generated=500, exclude=tried).decode.address == fresh
            assert fresh not in tried
            tried.append(fresh)
        with pytest.raises(Unavailable):
            one.route(short, exclude=tried)


async def test_the_key_is_that_of_all_workers_whoever_is_left_to_choose_from() -> None:
    """One with smaller blocks makes it shorter, also where it was tried already."""
    workers = (FakeWorker(block_size=BLOCK // 2), FakeWorker(), FakeWorker(), FakeWorker())
    async with running(*workers):
        router = Router([worker.address for worker in workers], affinity=Affinity(num_blocks=1))
        await router.start()
        await eventually(lambda: all(router.heard_at(w.address) is not None for w in workers))
        named = set()
        for number in range(8):  # alike for half a block
            tokens = prompt(0, BLOCK // 2) + prompt(number)
            route = router.route(tokens, exclude=[workers[0].address])
            named.add(route.decode.address)
            route.outcome.dropped()
        assert len(named) == 1
        await router.close()


async def test_by_load_alone_if_asked_to() -> None:
    async with routing(3, affinity=None) as (router, picks, workers):
        named = Counter(router.route(prompt(1)).decode.address for _ in range(9))
        assert named == {worker.address: 3 for worker in workers}
        assert set(picks) == {("decode", "least_loaded")}


@pytest.mark.parametrize("num_prefill", [1, 3, 12])
async def test_spares_are_named_up_to_a_bound(num_prefill: int) -> None:
    async with routing(1, num_prefill) as (router, _, _workers):
        targets = router.route(prompt(1)).prefill_targets
        assert len(set(targets)) == len(targets) == min(num_prefill, 8)
