"""A worker's load as a gateway reckons it: its own requests exactly, others' from reports."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from baton.v1 import common_pb2, decode_pb2_grpc
from gateway.routing.holds import Hold
from gateway.worker_watch import WorkerWatch, decode_watch
from tests.fake_decode import FakeWorker, running
from tests.waiting import eventually


@asynccontextmanager
async def watching(worker: FakeWorker) -> AsyncIterator[WorkerWatch]:
    async with running(worker):
        watch = decode_watch(
            worker.address, (), clock=time.monotonic, random=Random(1), on_change=lambda: None
        )
        watch.start()
        try:
            await eventually(lambda: watch.is_up)
            yield watch
        finally:
            await watch.close()


def num_requests(watch: WorkerWatch) -> int:
    return watch.candidate(1).num_requests


async def report(worker: FakeWorker, watch: WorkerWatch, running: int, waiting: int) -> None:
    worker.script.load = common_pb2.Load(running=running, waiting=waiting, blocks_total=1000)
    await eventually(lambda: watch.load is not None and watch.load.running == running)


def there(watch: WorkerWatch) -> Hold:
    hold = watch.holds.take()
    hold.arrive()
    return hold


async def test_own_requests_count_from_their_pick_to_their_end_and_never_twice() -> None:
    worker = FakeWorker()
    async with watching(worker) as watch:
        holds = [there(watch) for _ in range(3)]
        assert num_requests(watch) == 3
        await report(worker, watch, running=2, waiting=1)  # the same three
        assert num_requests(watch) == 3
        holds[0].release()
        holds[0].release()
        assert num_requests(watch) == 2
        for hold in holds:
            hold.release()
        assert num_requests(watch) == 0  # without waiting for a report


async def test_what_others_have_there_comes_with_the_reports() -> None:
    worker = FakeWorker()
    async with watching(worker) as watch:
        hold = there(watch)
        await report(worker, watch, running=4, waiting=2)
        assert num_requests(watch) == 6
        hold.release()
        assert num_requests(watch) == 5
        there(watch)
        there(watch)
        assert num_requests(watch) == 7


async def test_what_is_still_on_its_way_is_not_taken_for_what_others_have_there() -> None:
    worker = FakeWorker()
    async with watching(worker) as watch:
        holds = [watch.holds.take() for _ in range(4)]
        await report(worker, watch, running=5, waiting=0)  # all of them others'
        assert num_requests(watch) == 4 + 5
        for hold in holds:
            hold.arrive()
        assert num_requests(watch) == 4 + 5
        await report(worker, watch, running=9, waiting=0)
        assert num_requests(watch) == 4 + 5


async def test_a_refusal_of_the_process_before_does_not_shut_its_successor_out() -> None:
    worker = FakeWorker()
    async with watching(worker) as watch:
        before = watch.instance
        await worker.kill()
        await eventually(lambda: not watch.is_up)
        await worker.start()
        await eventually(lambda: watch.is_up)
        watch.note_draining(before)
        assert watch.takes_work
        watch.note_draining(watch.instance)
        assert not watch.takes_work


class _GoneAfterOneLook(WorkerWatch):
    """As if the loop ran between two looks of another thread."""

    @property
    def load(self) -> common_pb2.Load | None:
        load, self._load = self._load, None
        return load

    @load.setter
    def load(self, load: common_pb2.Load | None) -> None:  # type: ignore[override]
        self._load = load


async def test_whether_it_takes_work_can_be_read_in_another_thread_while_it_goes() -> None:
    stub_for = decode_pb2_grpc.DecodeStub
    watch = _GoneAfterOneLook(
        "127.0.0.1:1", stub_for, (), clock=time.monotonic, random=Random(1), on_change=lambda: None
    )
    watch.load = common_pb2.Load()
    assert watch.takes_work
    assert not watch.takes_work
    await watch.close()
