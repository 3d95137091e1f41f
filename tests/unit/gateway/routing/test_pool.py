"""Who is watched, over real load streams, while names and workers come and go."""

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

from gateway.routing.names import WorkerNames
from gateway.routing.pool import WorkerPool
from gateway.worker_watch import WorkerWatch, decode_watch
from tests.fake_decode import FakeWorker, running
from tests.waiting import eventually


class World:
    """A pool whose DNS the test writes."""

    def __init__(self, *entries: str) -> None:
        self.zone: dict[str, Sequence[str]] = {}
        self.num_lookups = 0
        self.made: list[WorkerWatch] = []
        self.pool = WorkerPool(
            WorkerNames.parse(entries),
            self._make,
            resolve=self._resolve,
            discovery_s=0.02,
            on_change=lambda: None,
        )

    async def _resolve(self, name: str, port: int) -> Sequence[str]:
        self.num_lookups += 1
        return self.zone.get(name, ())

    def _make(self, address: str, on_change) -> WorkerWatch:  # type: ignore[no-untyped-def]
        watch = decode_watch(address, (), clock=time.monotonic, random=Random(1), on_change=on_change)
        self.made.append(watch)
        return watch

    @property
    def up(self) -> list[str]:
        return [watch.address for watch in self.pool.workers if watch.is_up]


@asynccontextmanager
async def watching(world: World) -> AsyncIterator[World]:
    await world.pool.start()
    try:
        yield world
    finally:
        await world.pool.close()


async def test_listed_and_found_workers_together_each_watched_once() -> None:
    async with running(FakeWorker(), FakeWorker(), FakeWorker()) as (one, two, three):  # noqa: SIM117
        async with watching(World(one.address, "dns:///a:1", "dns:///b:1")) as world:
            await eventually(lambda: world.up == [one.address])
            world.zone = {"a": [two.address, one.address], "b": [three.address, two.address]}
            await eventually(lambda: world.up == [one.address, two.address, three.address])
            assert len(world.made) == 3
            assert (world.pool.num_listed, world.pool.num_discovered) == (1, 2)


async def test_a_worker_that_left_dns_gets_nothing_new_and_is_watched_until_it_is_gone() -> None:
    async with running(FakeWorker(), FakeWorker()) as (one, two), watching(World("dns:///a:1")) as world:
        world.zone = {"a": [one.address, two.address]}
        await eventually(lambda: len(world.up) == 2)
        lost = next(watch for watch in world.made if watch.address == one.address).lost.next()
        world.zone = {"a": [two.address]}
        await eventually(lambda: world.up == [two.address])
        assert world.pool.num_retired == 1
        still = world.pool.find(one.address)
        assert still is not None
        assert still.is_up
        assert not lost.is_set()
        await one.kill()
        await eventually(lambda: world.pool.num_retired == 0)
        assert lost.is_set()  # its calls have been told
        assert world.pool.find(one.address) is None


async def test_an_address_that_comes_back_keeps_its_connection() -> None:
    """DNS servers that disagree must not cut streams."""
    async with running(FakeWorker(), FakeWorker()) as (one, two), watching(World("dns:///a:1")) as world:
        for addresses in itertools.islice(itertools.cycle([[one.address], [one.address, two.address]]), 6):
            world.zone = {"a": addresses}
            await eventually(lambda addresses=addresses: sorted(world.up) == sorted(addresses))
        assert len(world.made) == 2


async def test_an_address_that_never_answered_is_dropped_at_once() -> None:
    async with running(FakeWorker()) as (one,), watching(World("dns:///a:1")) as world:
        world.zone = {"a": ["127.0.0.1:1", one.address]}
        await eventually(lambda: world.up == [one.address])
        world.zone = {"a": [one.address]}
        await eventually(lambda: world.pool.find("127.0.0.1:1") is None)
        assert world.pool.num_retired == 0


async def test_a_name_that_stands_for_nothing_any_more_keeps_its_workers() -> None:
    async with running(FakeWorker()) as (one,), watching(World("dns:///a:1")) as world:
        world.zone = {"a": [one.address]}
        await eventually(lambda: world.up == [one.address])
        world.zone = {}
        lookups = world.num_lookups
        await eventually(lambda: world.num_lookups > lookups + 2)
        assert world.up == [one.address]


async def test_one_process_under_two_addresses_is_one_worker() -> None:
    async with running(FakeWorker(instance="twin"), FakeWorker(instance="twin"), FakeWorker()) as workers:
        one, twin, other = workers
        async with watching(World(one.address, twin.address, other.address)) as world:
            await eventually(lambda: all(watch.is_up for watch in world.made))
            assert world.up == [one.address, other.address]
            await one.kill()
            await eventually(lambda: world.up == [twin.address, other.address])
            assert (world.pool.num_listed, world.pool.num_discovered) == (2, 0)


async def test_an_alias_found_by_name_is_no_other_worker_even_when_both_are_gone() -> None:
    one, twin = FakeWorker(instance="twin"), FakeWorker(instance="twin")
    async with running(one, twin), watching(World(one.address, "dns:///a:1")) as world:
        assert world.pool.num_unresolved == 1
        world.zone = {"a": [twin.address]}
        await eventually(lambda: len(world.made) == 2 and all(watch.is_up for watch in world.made))
        counts = (world.pool.num_listed, world.pool.num_discovered, world.pool.num_unresolved)
        assert counts == (1, 0, 0)
        await one.kill()
        await twin.kill()
        await eventually(lambda: not world.up)
        assert (world.pool.num_listed, world.pool.num_discovered) == (1, 0)
