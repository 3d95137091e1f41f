"""The processes of the failure matrix: two workers of each role, gateways, and a link that can fail.

Decode reaches `prefill` through `links`, each decode worker through its own. The simulated engine
notices at the join any page that is not this prompt's, and its text depends on every token's position,
so one sampled twice would show. A chunk's pages are more than may be under way (1 MB): what a dead worker
has not sent is lost.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from grpc import aio

from baton.v1 import common_pb2, decode_pb2_grpc, prefill_pb2_grpc
from services.engine.sim_model import write_sim_model
from services.rpc.channel import create_channel
from tests.integration.processes import READY_S, ServedProcess, free_addresses, left_behind
from tests.integration.status_relay import StatusRelay
from tests.tcp_proxy import TcpProxy
from tests.waiting import eventually

PREFILL_MS_PER_TOKEN = 15.0
PREFILL_CHUNK = 8  # tokens
NUM_PREFILL_SLOTS = 2
_LAYERS, _KV_HEADS, _HEAD_SIZE = 30, 12, 64
KV_BYTES_PER_TOKEN = 2 * _LAYERS * _KV_HEADS * _HEAD_SIZE * 4
# Somebody silent is found out after PING_TIMEOUT_S at the earliest and PING_S more at the latest.
PING_S, PING_TIMEOUT_S = 1.0, 2.5
_PINGS: dict[str, object] = {"ping_s": PING_S, "ping_timeout_s": PING_TIMEOUT_S}
_END_S = 30.0  # an interpreter with torch takes a while to end on a busy machine


def write_model(folder: Path) -> None:
    """A simulated model with 184 kB of KV cache a token, as that of a few billion parameters."""
    write_sim_model(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    shape = {"num_hidden_layers": _LAYERS, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_SIZE}
    path.write_text(json.dumps(config | shape))


class Worker(ServedProcess):
    """A prefill or decode worker, and a channel of the test's own to it, past every proxy."""

    def __init__(self, role: str, name: str, address: str, folder: Path, settings: dict[str, object]) -> None:
        super().__init__(name, f"services.{role}", address, folder, settings)
        self.channel: aio.Channel = create_channel(address)
        self.prefill = prefill_pb2_grpc.PrefillStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeStub(self.channel)
        self._stub = self.prefill if role == "prefill" else self.decode

    async def load(self) -> common_pb2.Load:
        """As it is now. Raises AioRpcError if the worker does not answer."""
        call = self._stub.WatchLoad(common_pb2.WatchLoadRequest(), timeout=1.0)
        try:
            load = await call.read()
        finally:
            call.cancel()
        assert isinstance(load, common_pb2.Load), f"{self.name} ended its load stream"
        return load

    async def is_ready(self) -> bool:
        assert self.is_alive, f"{self.name} has ended:\n{self.log_tail()}"
        try:
            await self.load()
        except aio.AioRpcError:
            return False
        return True

    async def is_idle(self) -> bool:
        """Whether no block is in use, and nothing runs or waits; not so if it does not answer."""
        try:
            load = await self.load()
        except aio.AioRpcError:
            return False
        return (load.blocks_used, load.running, load.waiting) == (0, 0, 0)


class GatewayProcess(ServedProcess):
    """A gateway; `decode_workers` are the addresses it knows."""

    async def sees_everybody(self) -> bool:
        assert self.is_alive, f"{self.name} has ended:\n{self.log_tail()}"
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                ready = (await client.get(f"http://{self.address}/readyz", timeout=2.0)).json()
        except httpx.HTTPError:
            return False
        return all(count["up"] == count["configured"] for count in ready["workers"].values())


class Rig:
    """Everything, started by `running_rig`; `overrides` are settings of the workers."""

    def __init__(self, folder: Path, **overrides: object) -> None:
        model = folder / "model"
        write_model(model)
        free = iter(free_addresses(7))
        shared = (
            _PINGS
            | {
                "model": model,
                "engine": "sim",
                "local_prefill": "never",
                "kv_transport": "grpc",  # what does not cross the link cannot be lost on it
                "kv_memory_mb": 256,
                "prefill_chunk": PREFILL_CHUNK,
                "max_page_bytes": 64 * 1024,
                "sim_token_ms": 5,
                "sim_jitter_ms": 1,
                "drain_s": 1,
            }
            | overrides
        )
        slow = shared | {
            "sim_prefill_ms_per_token": PREFILL_MS_PER_TOKEN,
            "sim_token_ms": 0,  # the first token overtakes the pages of the last chunk
            "sim_jitter_ms": 0,
            "max_num_seqs": NUM_PREFILL_SLOTS,
        }
        single = shared | {"max_num_seqs": 1}
        self.prefill = Worker("prefill", "prefill", next(free), folder, slow)
        self.spare = Worker("prefill", "spare", next(free), folder, shared)
        self.decode = [Worker("decode", f"decode-{n}", next(free), folder, single) for n in range(2)]
        self.links = [TcpProxy(self.prefill.address) for _ in self.decode]
        self.prefill_relay = StatusRelay(self.prefill.address)
        self.relayed_links: list[TcpProxy] = []  # to the relay, which has no address yet
        self.decode_relays = [StatusRelay(worker.address) for worker in self.decode]
        self._gateway_settings = _PINGS | {"model": model, "redis_url": "", "drain_s": 1}
        self._gateway_addresses = free
        self._folder = folder
        self.gateways: dict[str, GatewayProcess] = {}

    @property
    def workers(self) -> list[Worker]:
        return [self.prefill, self.spare, *self.decode]

    def add_gateway(self, name: str, decode_workers: Iterable[str], retry_s: float) -> None:
        """Its prompts go through the first link; `retry_s` is its patience when decode workers fail."""
        settings = self._gateway_settings | {
            "decode_workers": ",".join(decode_workers),
            "prefill_workers": self.links[0].address,
            "retry_s": retry_s,
        }
        address = next(self._gateway_addresses)
        self.gateways[name] = GatewayProcess(name, "gateway", address, self._folder, settings)

    async def ready(self) -> None:
        """Mends what a test has broken, and waits until everybody is there and idle."""
        for link in (*self.links, *self.relayed_links):
            link.heal()
        for relay in (self.prefill_relay, *self.decode_relays):
            relay.heal()
        processes = [*self.workers, *self.gateways.values()]
        for process in processes:
            if process.is_alive:
                process.resume()  # a cell that failed may have left it stopped
            else:
                process.start()
        for worker in self.workers:
            await eventually(worker.is_ready, timeout=READY_S)
        for gateway in self.gateways.values():
            await eventually(gateway.sees_everybody, timeout=READY_S)
        for worker in self.workers:
            await eventually(worker.is_idle)

    async def close(self) -> None:
        """Ends every process; fails if one had to be killed or left something behind."""
        processes: list[ServedProcess] = [*self.workers, *self.gateways.values()]
        alive = [process for process in processes if process.is_alive]
        for process in alive:
            process.resume()
        statuses = await asyncio.gather(*(asyncio.to_thread(process.end, _END_S) for process in alive))
        for worker in self.workers:
            await worker.channel.close()
        # uvicorn drains, then hands the signal on to whoever would have had it.
        good = (0, -signal.SIGTERM)
        failed = {p.name: status for p, status in zip(alive, statuses, strict=True) if status not in good}
        assert not failed, f"exit statuses after SIGTERM: {failed}"
        assert left_behind(processes) == []


@asynccontextmanager
async def running_workers(folder: Path, **overrides: object) -> AsyncIterator[Rig]:
    """No gateways and no relays; links that may stay unused."""
    rig = Rig(folder, **overrides)
    async with AsyncExitStack() as exits:
        exits.push_async_callback(rig.close)
        for link in rig.links:
            await exits.enter_async_context(link)
        await rig.ready()
        yield rig


@asynccontextmanager
async def running_rig(folder: Path) -> AsyncIterator[Rig]:
    """Three gateways: `pair` knows both decode workers, `lonely` the first, `relayed` both behind relays."""
    rig = Rig(folder)
    async with AsyncExitStack() as exits:
        exits.push_async_callback(rig.close)
        for server in (*rig.links, rig.prefill_relay, *rig.decode_relays):
            await exits.enter_async_context(server)
        for _ in rig.decode:
            link = await exits.enter_async_context(TcpProxy(rig.prefill_relay.address))
            rig.relayed_links.append(link)
        rig.add_gateway("pair", [worker.address for worker in rig.decode], retry_s=10)
        rig.add_gateway("lonely", [rig.decode[0].address], retry_s=1)
        rig.add_gateway("relayed", [relay.address for relay in rig.decode_relays], retry_s=1)
        await rig.ready()
        yield rig
