"""Who is silent is found out by pings, as soon as the settings say; who is slow is not; what a target is."""

import asyncio

import grpc
import pytest
from grpc import aio

from baton.v1 import common_pb2, decode_pb2_grpc
from services.rpc.channel import Pings, create_channel, server_options
from tests.tcp_proxy import TcpProxy
from tests.unit.rpc.echo_service import SERVICE, EchoService
from tests.waiting import eventually

QUICK = Pings(every_s=0.2, timeout_s=0.3)
NEVER = Pings(every_s=600.0, timeout_s=600.0)
SOON_S = 3.0  # half of what the defaults take


@pytest.mark.parametrize(("of_client", "of_server"), [(QUICK, NEVER), (NEVER, QUICK)])
async def test_a_silent_peer_is_found_out_by_whoever_pings(of_client: Pings, of_server: Pings) -> None:
    service = EchoService()
    server = aio.server(options=server_options(of_server))
    server.add_generic_rpc_handlers((service.handlers(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with TcpProxy(address) as proxy, create_channel(proxy.address, pings=of_client) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Write")(b"hang")
        await eventually(lambda: service.num_started == 1)
        proxy.go_black()
        if of_client is QUICK:
            code = await asyncio.wait_for(call.code(), SOON_S)
            assert code is grpc.StatusCode.UNAVAILABLE
        else:
            await eventually(lambda: service.num_released == 1, timeout=SOON_S)
            assert not call.done()
    await server.stop(None)


async def test_nobody_is_given_up_for_saying_nothing_but_answers_to_pings() -> None:
    service = EchoService()
    server = aio.server(options=server_options(QUICK))
    server.add_generic_rpc_handlers((service.handlers(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with TcpProxy(address) as proxy, create_channel(proxy.address, pings=QUICK) as channel:
        call = channel.unary_stream(f"/{SERVICE}/Write")(b"hang")
        await eventually(lambda: service.num_started == 1)
        ping_bytes = 17  # of HTTP/2
        await proxy.to_target.wait_for(proxy.to_target.num_bytes + 10 * ping_bytes)
        assert not call.done()
        assert service.num_released == 0
    await server.stop(None)


@pytest.mark.parametrize("host", ["dns", "unix"])
async def test_a_host_that_is_called_like_a_scheme_is_a_host(host: str) -> None:
    channel = create_channel(f"{host}:50051")
    with pytest.raises(aio.AioRpcError) as failed:
        await decode_pb2_grpc.DecodeStub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=2)
    complaint = failed.value.details() or ""  # whatever the resolver here says of the host
    assert "resolving 50051" not in complaint
    assert "No such file" not in complaint
    await channel.close()


async def test_a_peer_that_is_slow_to_accept_is_no_dead_one() -> None:
    service = EchoService()
    server = aio.server(options=server_options())
    server.add_generic_rpc_handlers((service.handlers(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with TcpProxy(address) as proxy, create_channel(proxy.address) as channel:
        proxy.go_black()
        asking = asyncio.ensure_future(channel.unary_unary(f"/{SERVICE}/Ask")(b"hello"))
        await eventually(lambda: proxy.num_accepted == 1)
        await asyncio.wait({asking}, timeout=0.5)
        assert not asking.done()
        proxy.heal()
        assert await asking == b"hello"
        assert proxy.num_accepted == 1
    await server.stop(None)
