"""What a channel takes its target for."""

import pytest
from grpc import aio

from baton.v1 import common_pb2, decode_pb2_grpc
from services.rpc.channel import create_channel


@pytest.mark.parametrize("host", ["dns", "unix"])
async def test_a_host_that_is_called_like_a_scheme_is_a_host(host: str) -> None:
    channel = create_channel(f"{host}:50051")
    with pytest.raises(aio.AioRpcError) as failed:
        await decode_pb2_grpc.DecodeStub(channel).GetInfo(common_pb2.GetInfoRequest(), timeout=2)
    complaint = failed.value.details() or ""  # whatever the resolver here says of the host
    assert "resolving 50051" not in complaint
    assert "No such file" not in complaint
    await channel.close()
