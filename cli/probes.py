"""Asks processes how they are: one question, one short deadline, no retry.

Each role answers in its own protocol: Redis to PING, workers by `grpc.health.v1` and their load
stream, gateways by `/readyz`. A process that does not answer is not ready; that is no error here.
"""

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process says about itself. None stands for what its role does not have or did not say."""

    ready: bool
    detail: str = ""  # why it is not ready, in a few words
    draining: bool | None = None
    num_unseen: int = 0  # workers that a gateway should know and has not met
    running: int | None = None
    waiting: int | None = None
    blocks_used: int | None = None
    blocks_cached: int | None = None
    blocks_total: int | None = None


def probe(role: str, address: str, timeout: float = 2.0) -> Answer:
    """Asks one process of the stack at `host:port`."""
    try:
        if role == "redis":
            return _probe_redis(address, timeout)
        if role == "gateway":
            return _probe_gateway(address, timeout)
        return _probe_worker(role, address, timeout)
    except OSError as error:
        return Answer(ready=False, detail=str(error))


def _probe_redis(address: str, timeout: float) -> Answer:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout) as connection:
        connection.sendall(b"PING\r\n")
        answer = connection.recv(64)
    return Answer(ready=answer == b"+PONG\r\n", detail=answer.decode(errors="replace").strip())


def _probe_gateway(address: str, timeout: float) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        return Answer(ready=False, detail=f"/readyz: {error!r}")
    finally:
        connection.close()
    said = _json_object(body)
    return Answer(
        ready=response.status == 200,
        detail=""
        if response.status == 200
        else f"/readyz {response.status}: {body.decode(errors='replace')}",
        draining=said.get("status") == "draining" or bool(said.get("draining")),
        num_unseen=_num_unseen(said.get("workers")),
    )


def _num_unseen(workers: object) -> int:
    counts = workers.values() if isinstance(workers, dict) else ()
    return sum(
        count["configured"] + count.get("discovered", 0) + count.get("unresolved", 0) - count["up"]
        for count in counts
    )


def _probe_worker(role: str, address: str, timeout: float) -> Answer:
    import grpc  # here, because it takes a quarter of a second to load
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from baton.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc

    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout
            )
            stub = (
                prefill_pb2_grpc.PrefillStub(channel)
                if role == "prefill"
                else decode_pb2_grpc.DecodeStub(channel)
            )
            loads = stub.WatchLoad(common_pb2.WatchLoadRequest(), timeout=timeout)
            load = next(loads)
            loads.cancel()
        except grpc.RpcError as error:
            return Answer(ready=False, detail=f"{error.code().name}: {error.details()}")
    return Answer(
        ready=health.status == health_pb2.HealthCheckResponse.SERVING,
        draining=load.draining,
        running=load.running,
        waiting=load.waiting,
        blocks_used=load.blocks_used,
        blocks_cached=load.blocks_cached,
        blocks_total=load.blocks_total,
    )


def check_redis_url(url: str, timeout: float = 3.0) -> str | None:
    """Pings the Redis of a URL; None if it answers, else what went wrong."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_connect_timeout=timeout, socket_timeout=timeout) as client:
            client.ping()
    except (RedisError, ValueError, OSError) as error:
        try:
            where = urlsplit(url)  # without the password
            return f"{where.hostname}:{where.port or 6379}: {error}"
        except ValueError:
            return "it is not the URL of a Redis"
    return None


def _json_object(body: bytes) -> Mapping[str, object]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
