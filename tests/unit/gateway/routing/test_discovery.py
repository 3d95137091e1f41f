"""Following a DNS name, with a resolver that the test scripts."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from gateway.routing.discovery import DnsWatch, resolve
from gateway.routing.names import DnsName
from tests.waiting import eventually

NAME = DnsName("decode.test", 50051)


class Resolver:
    """Answers what it was last told to."""

    def __init__(self) -> None:
        self.answer: Sequence[str] | Exception = ()
        self.hangs = False
        self.num_lookups = 0
        self.num_hanging = 0

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        assert (name, port) == (NAME.name, NAME.port)
        self.num_lookups += 1
        while self.hangs:
            self.num_hanging += 1
            try:
                await asyncio.sleep(0.005)
            finally:
                self.num_hanging -= 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class World:
    def __init__(self) -> None:
        self.resolver = Resolver()
        self.seen: list[tuple[str, ...]] = []
        self.watch = DnsWatch(
            NAME,
            resolve=self.resolver,
            interval_s=0.02,
            on_change=lambda: self.seen.append(self.watch.addresses),
        )

    async def round(self, answer: Sequence[str] | Exception) -> tuple[str, ...]:
        self.resolver.answer = answer
        await self.watch.refresh()
        return self.watch.addresses


async def test_addresses_come_and_go_each_once_in_one_order() -> None:
    world = World()
    assert await world.round(["b:1", "a:1", "b:1"]) == ("a:1", "b:1")
    assert await world.round(["b:1", "a:1"]) == ("a:1", "b:1")
    assert await world.round(["c:1", "b:1"]) == ("b:1", "c:1")
    assert world.seen == [("a:1", "b:1"), ("b:1", "c:1")]


@pytest.mark.parametrize("trouble", [OSError("no such name"), [], UnicodeError("label too long")])
async def test_a_lookup_that_finds_nothing_changes_nothing_and_is_logged_once(
    trouble: Exception | list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    await world.round(["a:1"])
    for _ in range(5):
        assert await world.round(trouble) == ("a:1",)
    await world.round(["a:1"])
    assert world.seen == [("a:1",)]
    said = [record.message for record in caplog.records if "decode.test" in record.message]
    assert len([line for line in said if "cannot be looked up" in line]) == 1
    assert len([line for line in said if "resolves again" in line]) == 1


async def test_a_lookup_that_hangs_is_one_lookup_and_its_answer_still_counts() -> None:
    world = World()
    await world.round(["a:1"])
    world.resolver.hangs = True
    for _ in range(4):
        assert await world.round(["b:1"]) == ("a:1",)
    assert world.resolver.num_lookups == 2
    world.resolver.hangs = False
    assert await world.round(["b:1"]) == ("b:1",)
    assert world.resolver.num_lookups == 2


async def test_it_asks_again_and_again_from_start_to_close() -> None:
    world = World()
    world.watch.start()
    await eventually(lambda: world.resolver.num_lookups >= 1)
    world.resolver.answer = ["a:1"]
    await eventually(lambda: world.watch.addresses == ("a:1",))
    world.resolver.answer = ["b:1"]
    await eventually(lambda: world.watch.addresses == ("b:1",))
    world.resolver.hangs = True
    await eventually(lambda: world.resolver.num_hanging == 1)
    await world.watch.close()
    assert world.resolver.num_hanging == 0


async def test_a_resolver_with_a_mistake_is_asked_again() -> None:
    world = World()
    world.resolver.answer = ZeroDivisionError()
    world.watch.start()
    await eventually(lambda: world.resolver.num_lookups >= 1)
    world.resolver.answer = ["a:1"]
    await eventually(lambda: world.watch.addresses == ("a:1",))
    await world.watch.close()


async def test_addresses_are_written_as_grpc_wants_them() -> None:
    assert await resolve("127.0.0.1", 7) == ["127.0.0.1:7"]
    assert await resolve("::1", 7) == ["[::1]:7"]
