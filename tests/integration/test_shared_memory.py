"""Where both ends run on one host, pages do not cross the link; and where that ends, they do again."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from grpc import aio

from baton.v1 import decode_pb2, decode_pb2_grpc
from cli import ports
from services.engine.sim_model import write_sim_model
from tests.integration.cluster import Reply, collect, generate_request, running_cluster
from tests.integration.failure_rig import Worker
from tests.integration.processes import left_behind
from tests.tcp_proxy import TcpProxy
from tests.waiting import eventually

NUM_TOKENS = 2000
KV_BYTES = NUM_TOKENS * 128


def request(*targets: str, salt: str = "") -> decode_pb2.GenerateRequest:
    """Prompts of one salt share what is cached; those without one have nothing in common."""
    return generate_request(
        f"reply-{secrets.token_hex(12)}",
        NUM_TOKENS,
        prefill_targets=targets,
        cache_salt=salt or secrets.token_hex(4),
    )


async def test_pages_cross_the_link_only_until_the_pool_is_mapped(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster, TcpProxy(cluster.targets[0]) as link:
        first = await collect(cluster.stub.Generate(request(link.address)))
        assert link.to_client.num_bytes > KV_BYTES, "the first transfer waits for nothing"
        await until_shared(cluster.stub, link.address)
        before = link.to_client.num_bytes
        reply = await collect(cluster.stub.Generate(request(link.address)))
        assert reply.text == first.text
        assert link.to_client.num_bytes - before < KV_BYTES / 10
        await eventually(lambda: cluster.blocks_used == 0, timeout=5)


async def test_what_decode_holds_is_not_read_again(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        await until_shared(cluster.stub, *cluster.targets)
        moved = []
        for _ in range(2):
            reply = await collect(cluster.stub.Generate(request(*cluster.targets, salt="same")))
            assert reply.finished is not None
            assert reply.finished.handoff.num_shared_pages == reply.finished.handoff.num_pages
            moved.append(reply.finished.handoff.num_bytes)
        assert moved == [KV_BYTES, 128]


@pytest.mark.slow
@pytest.mark.parametrize("refuses", ["prefill", "decode"])
async def test_either_end_may_refuse(tmp_path: Path, refuses: str) -> None:
    async with workers(tmp_path, {refuses: "grpc"}) as (prefill, decode):
        for _ in range(3):
            reply = await collect(decode.decode.Generate(request(prefill.address)))
            assert reply.finished is not None
            assert reply.finished.handoff.num_shared_pages == 0


@pytest.mark.slow
async def test_a_prefill_worker_that_is_replaced_is_read_anew_and_the_dead_ones_memory_is_let_go(
    tmp_path: Path,
) -> None:
    async with workers(tmp_path, {}) as (prefill, decode):
        texts = set()
        for signal in (prefill.kill, partial(prefill.end, 10.0), None):
            texts.add((await until_shared(decode.decode, prefill.address)).text)
            assert num_mapped(decode) == 1
            if signal is None:
                break
            signal()
            prefill.start()
            await eventually(prefill.is_ready, timeout=60)
        assert len(texts) == 1
        for worker in (prefill, decode):
            await eventually(worker.is_idle, timeout=2)


@pytest.mark.slow
async def test_a_dead_workers_memory_is_let_go_though_nobody_calls_its_address_again(
    tmp_path: Path,
) -> None:
    async with workers(tmp_path, {}) as (prefill, decode):
        await until_shared(decode.decode, prefill.address)
        assert num_mapped(decode) == 1
        prefill.kill()
        await eventually(lambda: num_mapped(decode) == 0, timeout=10)


@pytest.mark.slow
async def test_a_reader_that_is_killed_in_mid_read_leaves_no_block_behind(tmp_path: Path) -> None:
    async with workers(tmp_path, {}) as (prefill, decode):
        await until_shared(decode.decode, prefill.address)
        calls = [decode.decode.Generate(request(prefill.address)) for _ in range(20)]
        reading = [asyncio.create_task(collect(call)) for call in calls]
        await eventually(lambda: is_busy(prefill), timeout=10)
        decode.kill()
        ends = await asyncio.gather(*reading, return_exceptions=True)
        assert any(isinstance(end, aio.AioRpcError) for end in ends)
        await eventually(prefill.is_idle, timeout=2)


async def until_shared(decode: "decode_pb2_grpc.DecodeAsyncStub", target: str) -> Reply:
    """Asks until a transfer has gone through shared memory altogether."""
    async with asyncio.timeout(20):
        while True:
            try:
                reply = await collect(decode.Generate(request(target)))
            except aio.AioRpcError:  # the channel has not found out yet that the worker is back
                continue
            assert reply.finished is not None
            handoff = reply.finished.handoff
            assert handoff.num_bytes == KV_BYTES
            if handoff.num_shared_pages == handoff.num_pages:
                return reply


async def is_busy(worker: Worker) -> bool:
    return not await worker.is_idle()


def num_mapped(decode: Worker) -> int:
    maps = Path(f"/proc/{decode.pid}/maps").read_text()
    return sum("memfd:baton-kv" in line for line in maps.splitlines())


@asynccontextmanager
async def workers(folder: Path, transports: dict[str, str]) -> AsyncIterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker as processes of their own; `transports` by role."""
    model = folder / "model"
    write_sim_model(model)
    settings = {"model": model, "engine": "sim", "local_prefill": "never", "sim_token_ms": 1, "drain_s": 1}
    prefill, decode = (
        Worker(
            role,
            role,
            f"{ports.HOST}:{port}",
            folder,
            settings | {"kv_transport": transports.get(role, "auto")},
        )
        for role, port in zip(("prefill", "decode"), ports.pick(2), strict=True)
    )
    async with AsyncExitStack() as exits:
        for worker in (prefill, decode):
            worker.start()
            exits.callback(worker.end, 10.0)
        for worker in (prefill, decode):
            exits.push_async_callback(worker.channel.close)
            await eventually(worker.is_ready, timeout=60)
        yield prefill, decode
    assert left_behind([prefill, decode]) == []
