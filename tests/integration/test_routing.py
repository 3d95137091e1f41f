"""Routing over real workers with simulated engines: affinity, drains, breakers, and a real lookup."""

import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.v1 import common_pb2
from gateway.event_log_memory import MemoryEventLog
from gateway.events import EventKind
from gateway.generation import Generations
from gateway.owned_reply import OwnedReply
from gateway.replies import ReplyHub
from gateway.router import Router
from gateway.routing.circuit_breaker import THRESHOLD
from gateway.routing.policy import Affinity
from gateway.sampling import ReplySpec, Sampling
from gateway.tokenizer import ChatTokenizer
from observability.telemetry import build
from services.decode.__main__ import add_servicer as add_decode
from services.engine.sim_model import write_sim_model
from services.prefill.__main__ import add_servicer as add_prefill
from tests.integration.cluster import RunningWorker, running_worker
from tests.integration.lies import flip
from tests.integration.lying_prefill import lying_prefill
from tests.integration.test_generation import text_of
from tests.waiting import eventually


@dataclass(slots=True)
class World:
    """Workers, and generations over any of them."""

    model: Path
    decode: list[RunningWorker] = field(default_factory=list)
    prefill: list[RunningWorker] = field(default_factory=list)

    @asynccontextmanager
    async def gateway(
        self,
        decode: Sequence[str] = (),
        prefill: Sequence[str] = (),
        affinity: Affinity | None = Affinity(),  # noqa: B008  # frozen
    ) -> AsyncIterator[tuple[Router, Generations]]:
        """A gateway's inside, once it sees as many workers as there are; entries default to all."""
        telemetry = build("gateway", "test")
        hub = ReplyHub(MemoryEventLog("g1"), gateway_id="g1", lease_s=3.0, resume_grace_s=30.0)
        router = Router(
            decode or [worker.address for worker in self.decode],
            prefill or [worker.address for worker in self.prefill],
            affinity=affinity,
            discovery_s=0.1,
        )
        generations = Generations(
            hub, router, ChatTokenizer(self.model), telemetry, admit_timeout_s=5, retry_s=5, max_replies=100
        )
        await hub.start()
        await router.start()
        num_workers = len(decode or self.decode) + len(prefill or self.prefill)
        try:
            await eventually(lambda: sum(counts["up"] for counts in router.counts.values()) == num_workers)
            yield router, generations
        finally:
            await generations.close()
            await router.close()
            await hub.close()
            telemetry.shutdown()


@asynccontextmanager
async def world(folder: Path, num_decode: int = 1, num_prefill: int = 1) -> AsyncIterator[World]:
    world = World(folder / "baton-sim")
    write_sim_model(world.model)
    async with AsyncExitStack() as exits:
        for _ in range(num_decode):
            decode = running_worker(
                world.model, common_pb2.ROLE_DECODE, add_decode, "baton.v1.Decode", local_prefill="never"
            )
            world.decode.append(await exits.enter_async_context(decode))
        for _ in range(num_prefill):
            prefill = running_worker(world.model, common_pb2.ROLE_PREFILL, add_prefill, "baton.v1.Prefill")
            world.prefill.append(await exits.enter_async_context(prefill))
        yield world


async def generate(router: Router, generations: Generations, prompt: int = 7) -> OwnedReply:
    """Ten tokens for a prompt of 100, different for every number."""
    model = router.model
    assert model is not None
    spec = ReplySpec(
        model=model.name,
        fingerprint=model.fingerprint,
        prompt_token_ids=tuple((prompt * i) % 200 for i in range(100)),
        sampling=Sampling(max_tokens=10),
        seed=11,
        timeout_s=30.0,
    )
    reply = await generations.start(spec, arrived=time.monotonic())
    await eventually(lambda: reply.settled)
    assert reply.events[-1].kind is EventKind.DONE
    return reply


def breaker(router: Router, address: str) -> str:
    (state,) = [worker.breaker for worker in router.worker_states if worker.address == address]
    return state


async def test_workers_behind_a_name_that_is_really_looked_up(tmp_path: Path) -> None:
    async with world(tmp_path) as workers:
        decode, prefill = (
            f"dns:///localhost:{worker.address.rpartition(':')[2]}"
            for worker in (workers.decode[0], workers.prefill[0])
        )
        async with workers.gateway([decode], [prefill]) as (router, generations):
            await generate(router, generations)
            addresses = {worker.address for worker in router.worker_states}
            assert {workers.decode[0].address, workers.prefill[0].address} <= addresses
            found = {info[4][0] for info in socket.getaddrinfo("localhost", 1, type=socket.SOCK_STREAM)}
            counts = router.counts["decode"]
            assert (counts["configured"], counts["discovered"]) == (0, len(found))


async def test_a_prompt_comes_back_to_where_its_beginning_is_cached(tmp_path: Path) -> None:
    """Every prompt is computed once by one worker; by load alone others compute it again."""
    totals = {}
    for name, affinity in (("affinity", Affinity()), ("load", None)):
        async with (
            world(tmp_path / name, num_decode=2, num_prefill=2) as workers,
            workers.gateway(affinity=affinity) as (router, generations),
        ):
            for _ in range(4):
                for prompt in (3, 7, 11):
                    await generate(router, generations, prompt)
            totals[name] = sum(w.worker.load().prompt_tokens_computed for w in workers.prefill)
            totals[f"{name} bytes"] = sum(w.worker.kv.traffic.received for w in workers.decode)
    assert totals["affinity"] == 3 * 100 + 9  # of what is cached, a last token is computed all the same
    assert totals["load"] > totals["affinity"]
    assert totals["load bytes"] > totals["affinity bytes"]


async def test_a_worker_that_begins_to_drain_under_a_request_is_not_noticed(tmp_path: Path) -> None:
    async with (
        world(tmp_path, num_decode=2, num_prefill=2) as workers,
        workers.gateway() as (router, generations),
    ):
        undisturbed = await generate(router, generations)
        (preferred,) = [w for w in workers.decode if w.worker.kv.traffic.received]
        (prefill,) = [w for w in workers.prefill if w.worker.kv.traffic.sent]
        # Nothing is awaited in between: the gateway picks before it can have heard.
        preferred.server.lifecycle.draining.set()
        prefill.server.lifecycle.draining.set()
        again = await generate(router, generations)
        assert text_of(again) == text_of(undisturbed)
        (other,) = [w for w in workers.decode if w is not preferred]
        assert other.worker.kv.traffic.received
        for worker in (preferred, prefill):
            assert breaker(router, worker.address) == "closed"
        states = {worker.address: worker.state for worker in router.worker_states}
        assert states[preferred.address] == states[prefill.address] == "draining"


async def test_a_prefill_worker_whose_pages_are_wrong_is_asked_no_more(tmp_path: Path) -> None:
    """It looks well to the gateway, which never calls it: only decode can tell."""
    async with world(tmp_path) as workers:
        honest = workers.prefill[0].address
        async with (
            lying_prefill(honest, flip) as (liar, servicer),
            workers.gateway(prefill=[liar, honest], affinity=None) as (router, generations),
        ):
            for _ in range(20):  # by load alone, the two take turns
                if breaker(router, liar) == "open":
                    break
                await generate(router, generations)
            assert breaker(router, liar) == "open"
            assert breaker(router, honest) == breaker(router, workers.decode[0].address) == "closed"
            assert servicer.num_calls == THRESHOLD
            await generate(router, generations)
            assert servicer.num_calls == THRESHOLD
