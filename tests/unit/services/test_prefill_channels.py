"""Which channels to prefill workers stay open: on a clock that the test turns, and with a call under way."""

from collections.abc import AsyncIterator

import pytest

from baton.v1 import common_pb2
from services.decode.prefill_channels import IDLE_S, MOST_IDLE, PrefillChannels
from tests.fake_decode import FakeWorker, running


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.channels = PrefillChannels((), clock=lambda: self.now)

    def use(self, *targets: str) -> None:
        with self.channels.borrowed() as client_for:
            for target in targets:
                client_for(target)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.channels.close()


async def test_a_channel_that_is_used_again_and_again_stays(world: World) -> None:
    with world.channels.borrowed() as client_for:
        first = client_for("a:1")
    for _ in range(5):
        world.now += IDLE_S - 1.0
        with world.channels.borrowed() as client_for:
            assert client_for("a:1") is first
    assert world.channels.targets == {"a:1"}


async def test_one_that_nobody_uses_any_more_is_closed(world: World) -> None:
    world.use("a:1", "b:1")
    world.now += IDLE_S - 1.0
    world.use("b:1")
    world.now += 1.0
    world.use("c:1")
    assert world.channels.targets == {"b:1", "c:1"}


async def test_however_many_are_named_the_last_used_stay(world: World) -> None:
    for number in range(2 * MOST_IDLE):
        world.now += 0.1
        world.use(f"pod-{number}:1")
    assert world.channels.targets == {f"pod-{number}:1" for number in range(MOST_IDLE, 2 * MOST_IDLE)}


async def test_one_in_use_is_never_closed(world: World) -> None:
    prefill = FakeWorker(role=common_pb2.ROLE_PREFILL)
    async with running(prefill):
        with world.channels.borrowed() as client_for:
            call = client_for(prefill.address).stub.WatchLoad(common_pb2.WatchLoadRequest())
            await call.read()
            world.use(prefill.address)  # by another, who is through with it
            for number in range(2 * MOST_IDLE):
                world.now += IDLE_S
                world.use(f"pod-{number}:1")
            assert isinstance(await call.read(), common_pb2.Load)
            call.cancel()
        assert prefill.address in world.channels.targets
        world.now += IDLE_S
        world.use("other:1")
        assert world.channels.targets == {"other:1"}


async def test_closing_leaves_none(world: World) -> None:
    world.use("a:1", "b:1")
    await world.channels.close()
    assert world.channels.targets == set()
