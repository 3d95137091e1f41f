"""A router whose workers come and go by name."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.errors import Unavailable
from gateway.router import Router
from tests.fake_decode import FakeWorker, Script, running, text
from tests.unit.gateway.generating import NUM_TOKENS, gateway, text_of
from tests.waiting import eventually

PROMPT = tuple(range(40))


class Zone:
    """What the names stand for now."""

    def __init__(self, **names: Sequence[str]) -> None:
        self.names = names
        self.is_down = False
        self.num_lookups = 0

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        self.num_lookups += 1
        if self.is_down:
            raise OSError("no answer")
        return self.names.get(name, ())


@asynccontextmanager
async def routing(zone: Zone, *entries: str) -> AsyncIterator[Router]:
    router = Router(entries, resolve=zone.resolve, discovery_s=0.02)
    await router.start()
    try:
        yield router
    finally:
        await router.close()


def named(router: Router) -> set[str]:
    """Everybody that a request may be sent to."""
    seen: set[str] = set()
    while True:
        try:
            route = router.route(PROMPT, exclude=seen)
        except Unavailable:
            return seen
        seen.add(route.decode.address)
        route.outcome.dropped()


def counts(configured: int, discovered: int, unresolved: int, up: int) -> dict[str, int]:
    return {"configured": configured, "discovered": discovered, "unresolved": unresolved, "up": up}


async def test_workers_come_and_go_as_the_name_says() -> None:
    async with running(FakeWorker(), FakeWorker(), FakeWorker()) as (one, two, three):
        zone = Zone(decode=[two.address])
        async with routing(zone, one.address, "dns:///decode:50051") as router:
            await eventually(lambda: named(router) == {one.address, two.address})
            assert router.counts["decode"] == counts(1, 1, 0, 2)
            zone.names["decode"] = [two.address, three.address]
            await eventually(lambda: named(router) == {one.address, two.address, three.address})
            assert router.counts["decode"] == counts(1, 2, 0, 3)
            zone.names["decode"] = [three.address]
            await eventually(lambda: named(router) == {one.address, three.address})
            assert router.heard_at(two.address) is not None  # for what it still writes


async def test_without_an_answer_the_last_known_workers_stay() -> None:
    async with running(FakeWorker()) as (one,):
        zone = Zone(decode=[one.address])
        async with routing(zone, "dns:///decode:50051") as router:
            await eventually(lambda: router.is_ready)
            zone.is_down = True
            before = zone.num_lookups
            await eventually(lambda: zone.num_lookups > before + 3)
            assert named(router) == {one.address}


async def test_a_name_that_comes_later_makes_it_ready() -> None:
    async with running(FakeWorker()) as (one,):
        zone = Zone()
        async with routing(zone, "dns:///decode:50051") as router:
            with pytest.raises(Unavailable):
                router.route(PROMPT)
            assert router.counts["decode"] == counts(0, 0, 1, 0)
            zone.names["decode"] = [one.address]
            await eventually(lambda: router.is_ready)
            assert router.counts["decode"] == counts(0, 1, 0, 1)


async def test_a_stream_outlives_its_workers_name_and_new_ones_go_elsewhere() -> None:
    old = FakeWorker(script=Script(token_delay_s=0.02))
    new = FakeWorker()
    zone = Zone()
    async with gateway(old, new, resolve=zone.resolve, entries=["dns:///decode:50051"]) as gw:
        zone.names["decode"] = [old.address]
        await eventually(lambda: gw.router.is_ready)
        reply = await gw.start()
        zone.names["decode"] = [new.address]
        await eventually(lambda: named(gw.router) == {new.address})
        assert not reply.ended
        later = await gw.finished()
        await eventually(lambda: reply.settled)
        assert text_of(reply) == text_of(later) == text(NUM_TOKENS)
        assert (len(old.requests), len(new.requests)) == (1, 1)


async def test_a_stream_whose_retired_worker_dies_goes_on_elsewhere() -> None:
    old = FakeWorker(script=Script(token_delay_s=0.5))
    new = FakeWorker()
    zone = Zone()
    async with gateway(old, new, resolve=zone.resolve, entries=["dns:///decode:50051"]) as gw:
        zone.names["decode"] = [old.address]
        await eventually(lambda: gw.router.is_ready)
        reply = await gw.start()
        zone.names["decode"] = [new.address]
        await eventually(lambda: named(gw.router) == {new.address})
        await old.kill()
        await eventually(lambda: reply.settled)
        assert text_of(reply) == text(NUM_TOKENS)
        await eventually(lambda: gw.router.heard_at(old.address) is None)
