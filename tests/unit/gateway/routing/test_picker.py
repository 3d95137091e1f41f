"""The order of one role's workers, over watches that never connect."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest

from baton.v1 import common_pb2, decode_pb2_grpc
from gateway.routing.circuit_breaker import THRESHOLD
from gateway.routing.picker import Picker, Prompt
from gateway.routing.policy import Affinity
from gateway.worker_watch import WorkerWatch

BLOCK = 16


class Watch(WorkerWatch):
    """Counts how often it is compared with another."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        Watch.num_comparisons += 1
        return self is other

    __hash__ = WorkerWatch.__hash__

    def shut_out(self) -> None:
        for number in range(THRESHOLD):
            self.breaker.begin(f"reply-{number}").failed()


@asynccontextmanager
async def watches(number: int) -> AsyncIterator[list[Watch]]:
    found = []
    for n in range(number):
        watch = Watch(
            f"10.0.0.{n}:1",
            decode_pb2_grpc.DecodeStub,
            (),
            clock=time.monotonic,
            random=Random(1),
            on_change=lambda: None,
        )
        watch.info = common_pb2.WorkerInfo(block_size=BLOCK, max_num_seqs=8)
        watch.load = common_pb2.Load(blocks_total=1000)
        found.append(watch)
    try:
        yield found
    finally:
        for watch in found:
            await watch.close()


@pytest.mark.parametrize("affinity", [None, Affinity()])
@pytest.mark.parametrize("is_shut_out", [lambda n: False, lambda n: True, lambda n: n % 2 == 0])
async def test_all_are_ranked_without_comparing_each_with_each(
    affinity: Affinity | None, is_shut_out: Callable[[int], bool]
) -> None:
    picker = Picker(affinity, lambda role, outcome: None)
    async with watches(30) as workers:
        bad = {n for n in range(30) if is_shut_out(n)}
        for n in bad:
            workers[n].shut_out()
        Watch.num_comparisons = 0
        ranked = picker.ranked("decode", workers, Prompt(range(100), "", 100), block_size=BLOCK)
        assert Watch.num_comparisons == 0
        addresses = [watch.address for watch in ranked]
        assert sorted(addresses) == sorted(watch.address for watch in workers)
        assert set(addresses[30 - len(bad) :]) == {workers[n].address for n in bad}
