"""The router against real load streams: who is named, in which order, and who is not."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.v1 import common_pb2
from gateway.errors import Unavailable
from gateway.router import Router
from tests.fake_decode import FakeWorker, Script, running
from tests.waiting import eventually

PROMPT = tuple(range(40))


def busy(running: int = 0, waiting: int = 0, blocks_used: int = 0, *, draining: bool = False) -> Script:
    load = common_pb2.Load(
        running=running, waiting=waiting, blocks_used=blocks_used, blocks_total=1000, draining=draining
    )
    return Script(load=load)


def prefill(script: Script | None = None) -> FakeWorker:
    return FakeWorker(role=common_pb2.ROLE_PREFILL, script=script or Script())


@asynccontextmanager
async def routing(
    decode: list[FakeWorker], prefills: list[FakeWorker] | None = None
) -> AsyncIterator[Router]:
    """A router by load that sees all workers, and has sent nobody anything yet."""
    prefills = prefills or []
    async with running(*decode, *prefills):
        router = Router([w.address for w in decode], [w.address for w in prefills], affinity=None)
        await router.start()
        try:
            await eventually(
                lambda: all(router.heard_at(w.address) is not None for w in (*decode, *prefills))
            )
            yield router
        finally:
            await router.close()


def _num_usable(router: Router) -> int:
    seen: set[str] = set()
    while True:
        try:
            seen.add(router.route(PROMPT, exclude=seen).decode.address)
        except Unavailable:
            return len(seen)


async def test_nobody_there_is_unavailable_at_once() -> None:
    router = Router(["127.0.0.1:1"], [])
    await router.start()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        router.route(PROMPT)
    assert time.monotonic() - started < 0.1
    assert not router.is_ready
    assert router.model is None
    await router.close()


async def test_a_black_hole_is_never_named() -> None:
    """Something that accepts connections and says nothing."""
    hole = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = hole.sockets[0].getsockname()[1]
    worker = FakeWorker()
    async with running(worker):
        router = Router([f"127.0.0.1:{port}", worker.address])
        await router.start()
        await eventually(lambda: router.is_ready)
        assert {router.route(PROMPT).decode.address for _ in range(5)} == {worker.address}
        await router.close()
    hole.close()


async def test_the_model_is_what_the_workers_serve() -> None:
    async with routing([FakeWorker()]) as router:
        assert router.model is not None
        assert (router.model.name, router.model.max_model_len) == ("fake", 1000)
        assert router.is_ready


async def test_the_least_busy_worker_is_named() -> None:
    workers = [FakeWorker(script=busy(5)), FakeWorker(script=busy(1)), FakeWorker(script=busy(1, 3))]
    async with routing(workers) as router:
        assert router.route(PROMPT).decode.address == workers[1].address
        assert router.route(PROMPT, exclude=[workers[1].address]).decode.address == workers[2].address


async def test_a_worker_without_room_for_the_prompt_comes_last() -> None:
    workers = [FakeWorker(script=busy(0, 0, 999)), FakeWorker(script=busy(5, 0, 500))]
    async with routing(workers) as router:
        assert router.route(PROMPT).decode.address == workers[1].address


async def test_requests_on_their_way_count_so_that_a_burst_spreads() -> None:
    workers = [FakeWorker(), FakeWorker(), FakeWorker()]
    async with routing(workers) as router:
        named = [router.route(PROMPT).decode.address for _ in range(9)]
        assert {named.count(worker.address) for worker in workers} == {3}


async def test_draining_workers_are_left_out_and_come_back() -> None:
    workers = [FakeWorker(script=busy()), FakeWorker(script=busy(7))]
    async with routing(workers) as router:
        workers[0].script.load = common_pb2.Load(blocks_total=1000, draining=True)
        await eventually(lambda: _num_usable(router) == 1)
        assert router.route(PROMPT).decode.address == workers[1].address
        workers[0].script.load = common_pb2.Load(blocks_total=1000)
        await eventually(lambda: _num_usable(router) == 2)


async def test_prefill_workers_are_named_by_load_and_only_of_the_same_model() -> None:
    prefills = [prefill(busy(3)), prefill(busy(0)), prefill(busy(1))]
    stranger = FakeWorker(role=common_pb2.ROLE_PREFILL, fingerprint="another")
    async with routing([FakeWorker()], [*prefills, stranger]) as router:
        addresses = [prefills[i].address for i in (1, 2, 0)]
        assert list(router.route(PROMPT).prefill_targets) == addresses


async def test_a_decode_worker_of_another_model_is_never_named() -> None:
    workers = [FakeWorker(), FakeWorker(fingerprint="another")]
    async with running(*workers):
        router = Router([w.address for w in workers])
        await router.start()
        await eventually(lambda: router.is_ready)
        model = router.model
        assert model is not None
        own = next(w for w in workers if w.fingerprint == model.fingerprint)
        with pytest.raises(Unavailable):
            router.route(PROMPT, exclude=[own.address])
        # When the last worker of that model has gone, the other one's is served.
        await own.kill()
        await eventually(lambda: router.model != model and router.is_ready)
        await router.close()


async def test_a_killed_worker_is_gone_and_its_successor_is_found() -> None:
    worker = FakeWorker()
    async with routing([worker]) as router:
        lost = router.route(PROMPT).decode.lost.next()
        await worker.kill()
        await eventually(lambda: not router.is_ready, timeout=2)
        assert lost.is_set()
        assert router.heard_at(worker.address) is None
        waiting = asyncio.create_task(router.wait_for_change(10))
        await worker.start()
        await waiting
        await eventually(lambda: router.is_ready)


async def test_a_silent_worker_is_gone_after_three_seconds() -> None:
    worker = FakeWorker()
    async with routing([worker]) as router:
        worker.script.frozen = True
        await eventually(lambda: not router.is_ready, timeout=4.5)
        worker.script.frozen = False
        await eventually(lambda: router.is_ready, timeout=5)


async def test_waiting_for_a_change_ends_in_time() -> None:
    router = Router(["127.0.0.1:1"])
    started = time.monotonic()
    await router.wait_for_change(0.05)
    assert 0.04 <= time.monotonic() - started < 1
