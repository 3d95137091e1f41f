"""Bytes of pages on connections of their own; and whatever becomes of these, the reply is the same."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpc import aio

from baton.v1 import decode_pb2
from services.settings import KvTransport
from tests.integration.cluster import Cluster, Reply, collect, generate_request, running_cluster
from tests.integration.failure_rig import KV_BYTES_PER_TOKEN, write_model
from tests.integration.lying_prefill import lying_prefill
from tests.tcp_proxy import TcpProxy
from tests.waiting import eventually

pytestmark = pytest.mark.slow

NUM_TOKENS = 100
KV_BYTES = NUM_TOKENS * KV_BYTES_PER_TOKEN  # 18 MB: more than buffers hold
SLOW_BYTES_PER_S = 20_000_000


def request(*targets: str) -> decode_pb2.GenerateRequest:
    """The same prompt for every reply, whose cache nobody has."""
    return generate_request(
        f"reply-{secrets.token_hex(12)}", NUM_TOKENS, prefill_targets=targets, cache_salt=secrets.token_hex(4)
    )


@dataclass(slots=True)
class Linked:
    """A worker of each role, and proxies between them: for calls, and for data connections."""

    cluster: Cluster
    calls: TcpProxy
    data: TcpProxy

    async def ask(self) -> Reply:
        return await collect(self.cluster.stub.Generate(request(self.calls.address)))

    async def is_idle(self) -> bool:
        return self.cluster.blocks_used == 0


@asynccontextmanager
async def linked(folder: Path, **overrides: object) -> AsyncIterator[Linked]:
    settings = {"kv_transport": "tcp", "ping_s": 0.5, "ping_timeout_s": 1.0}
    settings |= {"prefix_cache": False, "kv_memory_mb": 400}
    async with running_cluster(folder, write_model=write_model, **(settings | overrides)) as cluster:
        worker = cluster.prefill[0].worker
        async with (
            TcpProxy(cluster.targets[0]) as calls,
            TcpProxy(f"127.0.0.1:{worker.data_port or 1}") as data,
        ):
            if worker.data_port:
                worker.data_port = int(data.address.rpartition(":")[2])
            yield Linked(cluster, calls, data)


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[Linked]:
    """Past the first transfer, which learns where data connections are to be opened."""
    async with linked(tmp_path) as link:
        await link.ask()
        assert link.data.num_accepted == 0
        yield link
        await eventually(link.is_idle, timeout=2)


async def whole(link: Linked) -> str:
    """The text of a reply that nothing disturbs."""
    reply = await link.ask()
    assert len(reply.token_ids) == 40
    return reply.text


async def test_bytes_go_on_the_connection_and_calls_carry_next_to_nothing(link: Linked) -> None:
    before = link.calls.to_client.num_bytes
    reply = await link.ask()
    assert reply.finished is not None
    handoff = reply.finished.handoff
    assert handoff.num_bytes == KV_BYTES
    # The first pages do not wait for the connection.
    in_messages = handoff.num_pages - handoff.num_data_pages
    assert in_messages <= 4
    assert link.data.to_client.num_bytes == pytest.approx(KV_BYTES, rel=0.5)
    assert link.data.to_client.num_bytes + link.calls.to_client.num_bytes - before >= KV_BYTES
    assert reply.text == await whole(link)


async def break_off(link: Linked) -> None:
    await link.data.reset()


async def go_black(link: Linked) -> None:
    link.data.go_black()


@pytest.mark.parametrize("breaks", [break_off, go_black], ids=lambda breaks: breaks.__name__)
async def test_a_connection_that_breaks_costs_an_attempt_and_blames_nobody(
    link: Linked, breaks: Callable[[Linked], object]
) -> None:
    expected = await whole(link)
    link.data.limit(SLOW_BYTES_PER_S)
    before = link.data.to_client.num_bytes
    asking = asyncio.create_task(link.ask())
    await link.data.to_client.wait_for(before + KV_BYTES // 10)
    await breaks(link)  # type: ignore[misc]
    reply = await asyncio.wait_for(asking, 10)
    assert reply.text == expected
    assert reply.finished is not None
    timings = reply.finished.timings
    assert timings.prefill_attempts == 2
    assert list(timings.failed_prefill_targets) == []
    assert reply.finished.handoff.num_data_pages == 0
    await eventually(link.is_idle, timeout=2)
    again = await link.ask()
    assert again.finished is not None
    assert (again.text, again.finished.timings.prefill_attempts) == (expected, 1)
    assert again.finished.handoff.num_data_pages == 0, "left alone for a while"


async def test_one_that_never_opens_is_waited_for_by_no_page(link: Linked) -> None:
    expected = await whole(link)
    link.data.go_black()
    reply = await asyncio.wait_for(link.ask(), 5)
    assert reply.finished is not None
    assert (reply.text, reply.finished.timings.prefill_attempts) == (expected, 1)
    assert reply.finished.handoff.num_data_pages == 0
    link.data.heal()


async def test_a_port_that_leads_nowhere_harms_nobody(tmp_path: Path) -> None:
    async with linked(tmp_path) as link:
        link.cluster.prefill[0].worker.data_port = 1
        texts = {(await link.ask()).text for _ in range(3)}
        assert len(texts) == 1


async def test_the_first_token_waits_for_no_page(tmp_path: Path) -> None:
    """All pages are named and 2 MB of them are on their way when it is sampled."""
    async with linked(tmp_path, sim_token_ms=100.0) as link:
        expected = await whole(link)
        link.data.limit(1_000_000)
        call = link.cluster.stub.Generate(request(link.calls.address))
        async with asyncio.timeout(3):
            first = await call.read()
        assert expected.startswith(first.delta.text)
        assert link.data.to_client.num_bytes < KV_BYTES + KV_BYTES // 4
        call.cancel()
        await eventually(link.is_idle, timeout=2)


async def test_cancelled_in_mid_transfer_nobody_keeps_a_block(link: Linked) -> None:
    link.data.limit(SLOW_BYTES_PER_S // 10)
    calls = [link.cluster.stub.Generate(request(link.calls.address)) for _ in range(4)]
    reading = [asyncio.create_task(collect(call)) for call in calls]
    await link.data.to_client.wait_for(link.data.to_client.num_bytes + 100_000)
    for call in calls:
        call.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await eventually(link.is_idle, timeout=2)
    await eventually(lambda: link.data.num_connections == 0, timeout=5)


async def test_many_at_once_do_not_mix_their_bytes(link: Linked) -> None:
    expected = await whole(link)
    replies = await asyncio.gather(*(link.ask() for _ in range(16)))
    assert {reply.text for reply in replies} == {expected}


@pytest.mark.parametrize("refuses", ["prefill", "decode"])
async def test_either_end_may_refuse(tmp_path: Path, refuses: str) -> None:
    async with linked(tmp_path) as link:
        worker = getattr(link.cluster, refuses)[0].worker
        if refuses == "prefill":
            worker.data_port = 0
        else:
            worker.settings = worker.settings.model_copy(update={"kv_transport": KvTransport.GRPC})
        for _ in range(2):
            reply = await link.ask()
            assert reply.finished is not None
            assert reply.finished.handoff.num_data_pages == 0
        assert link.data.num_accepted == 0


def _claim_data(messages):  # type: ignore[no-untyped-def]
    """Pages whose bytes are said to come elsewhere."""
    for message in messages:
        if message.HasField("page"):
            message.page.data_bytes = len(message.page.payload)
            message.page.payload = b""
    return messages


async def test_bytes_that_never_come_are_a_prefill_workers_fault(link: Linked) -> None:
    """It names them where nobody can have sent them: on no connection."""
    async with lying_prefill(link.cluster.targets[0], _claim_data) as (liar, _):
        with pytest.raises(aio.AioRpcError) as failed:
            await collect(link.cluster.stub.Generate(request(liar)))
        assert "data connection" in str(failed.value.details())
        await eventually(link.is_idle, timeout=2)
