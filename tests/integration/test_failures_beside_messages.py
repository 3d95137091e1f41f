"""Failures while pages go past the messages, on data connections or through shared memory: real processes.

As in the failure matrix, a reply ends in the text of an undisturbed run or in a typed error before its
deadline, and then nobody keeps a block. Here the worker that fails is in the middle of a transfer: decode has
some of its pages, others are not computed yet.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from baton.v1 import decode_pb2
from tests.integration.failure_cells import NUM_PROMPT_TOKENS, decode_request
from tests.integration.failure_rig import (
    KV_BYTES_PER_TOKEN,
    PING_S,
    PING_TIMEOUT_S,
    Rig,
    Worker,
    running_workers,
)
from tests.integration.processes import READY_S
from tests.integration.reply_readers import DecodeReply
from tests.waiting import eventually

RELEASE_S = 2.0
FOUND_OUT_S = PING_S + PING_TIMEOUT_S
AMPLE_S = 20.0
KV_BYTES = NUM_PROMPT_TOKENS * KV_BYTES_PER_TOKEN
WAYS: dict[str, Callable[[decode_pb2.HandoffTimings], int]] = {
    "tcp": lambda handoff: handoff.num_data_pages,
    "auto": lambda handoff: handoff.num_shared_pages,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.matrix,
    pytest.mark.timeout(READY_S + 60),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize(
        "whole_way",
        [pytest.param(way, marks=pytest.mark.xdist_group(f"beside-{way}")) for way in WAYS],
        indirect=True,
        scope="module",
    ),
]


@dataclass(slots=True)
class Way:
    """Two workers of each role between which pages go this way."""

    rig: Rig
    num_pages: Callable[[decode_pb2.HandoffTimings], int]

    def request(self, name: str, *targets: Worker) -> decode_pb2.GenerateRequest:
        addresses = [worker.address for worker in targets or (self.rig.prefill, self.rig.spare)]
        return decode_request(name, addresses)

    def start(self, request: decode_pb2.GenerateRequest, n: int = 0) -> DecodeReply:
        return DecodeReply(self.rig.decode[n].decode, request, AMPLE_S)

    async def learnt(self) -> None:
        """Returns once either decode worker gets pages this way from the slow prefill worker."""
        for n in range(len(self.rig.decode)):

            async def goes_this_way(n: int = n) -> bool:
                reply = self.start(self.request(secrets.token_hex(4), self.rig.prefill), n)
                await reply.ended()
                return reply.finished is not None and self.num_pages(reply.finished.handoff) > 0

            await eventually(goes_this_way, timeout=20)

    async def in_mid_transfer(self, name: str, *targets: Worker) -> DecodeReply:
        """A reply of which decode worker 0 has some pages, and prefill has not computed all."""
        decode, prefill = self.rig.decode[0], self.rig.prefill
        before = (await decode.load()).kv_bytes_received
        reply = self.start(self.request(name, *targets))

        async def has_some() -> bool:
            return (await decode.load()).kv_bytes_received > before

        await eventually(has_some)
        assert (await prefill.load()).running == 1
        assert (await decode.load()).kv_bytes_received - before < KV_BYTES
        assert not reply.text
        return reply

    async def released(self, *workers: Worker, within_s: float = RELEASE_S) -> None:
        await asyncio.gather(*(eventually(worker.is_idle, timeout=within_s) for worker in workers))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Way]:
    folder = tmp_path_factory.mktemp("rig")
    async with running_workers(folder, kv_transport=request.param, drain_s=5) as rig:
        yield Way(rig, WAYS[request.param])


@pytest_asyncio.fixture(loop_scope="module")
async def way(whole_way: Way) -> AsyncIterator[Way]:
    await whole_way.rig.ready()
    await whole_way.learnt()
    yield whole_way


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(whole_way: Way) -> DecodeReply:
    """What decode says to every prompt of this length."""
    await whole_way.rig.ready()
    reply = whole_way.start(whole_way.request("undisturbed", whole_way.rig.spare))
    await reply.ended()
    assert reply.complete
    assert len(reply.token_ids) == 40
    return reply


async def is_whole(reply: DecodeReply, undisturbed: DecodeReply, *, num_attempts: int) -> None:
    await reply.ended()
    assert (reply.error, reply.text) == (None, undisturbed.text), reply.details
    assert reply.token_ids == undisturbed.token_ids
    assert reply.finished is not None
    assert reply.finished.timings.prefill_attempts == num_attempts


@pytest.mark.parametrize("is_killed", [True, False], ids=["kill", "stop"])
async def test_prefill_fails(way: Way, undisturbed: DecodeReply, is_killed: bool) -> None:  # noqa: FBT001
    rig = way.rig
    helped = await way.in_mid_transfer(f"helped-{is_killed}")
    alone = way.start(way.request(f"alone-{is_killed}", rig.prefill), 1)
    await eventually(lambda: runs(rig.prefill, 2))
    if is_killed:
        rig.prefill.kill()
    else:
        rig.prefill.stop()
    await alone.ended()
    assert (alone.error, alone.token_ids) == ("UNAVAILABLE", [])
    await is_whole(helped, undisturbed, num_attempts=2)
    assert helped.finished is not None
    assert list(helped.finished.timings.failed_prefill_targets) == [rig.prefill.address]
    await way.released(rig.spare, *rig.decode)
    if not is_killed:
        rig.prefill.resume()
        await way.released(rig.prefill)


async def test_decode_is_killed(way: Way) -> None:
    rig = way.rig
    reply = await way.in_mid_transfer("decode-killed")
    rig.decode[0].kill()
    await reply.ended()
    assert reply.error == "UNAVAILABLE"
    await way.released(rig.prefill, rig.spare, rig.decode[1])


async def test_decode_is_stopped_and_goes_on(way: Way, undisturbed: DecodeReply) -> None:
    """Prefill finds out, and lets go; decode asks the spare when it wakes up, if it has a client."""
    rig = way.rig
    reply = await way.in_mid_transfer("decode-stopped")
    rig.decode[0].stop()
    await way.released(rig.prefill, within_s=FOUND_OUT_S + RELEASE_S)
    rig.decode[0].resume()
    await reply.ended()
    assert reply.error in (None, "UNAVAILABLE")
    assert reply.token_ids == undisturbed.token_ids[: len(reply.token_ids) if reply.error else None]
    await way.released(*rig.workers)


async def test_the_client_leaves(way: Way) -> None:
    reply = await way.in_mid_transfer("client-leaves")
    await reply.close()
    await way.released(*way.rig.workers)


async def test_another_epoch_supersedes_it(way: Way, undisturbed: DecodeReply) -> None:
    rig = way.rig
    old = await way.in_mid_transfer("superseded")
    request = way.request("superseded", rig.spare)
    request.reply_id, request.epoch = old.request.reply_id, old.request.epoch + 1
    new = way.start(request)
    await old.ended()
    assert (old.error, old.token_ids) == ("ABORTED", [])
    await is_whole(new, undisturbed, num_attempts=1)
    await way.released(*rig.workers)


async def test_prefill_drains(way: Way, undisturbed: DecodeReply) -> None:
    """What it has begun, it ends."""
    rig = way.rig
    reply = await way.in_mid_transfer("drained", rig.prefill)
    ending = asyncio.create_task(asyncio.to_thread(rig.prefill.end, AMPLE_S))
    await is_whole(reply, undisturbed, num_attempts=1)
    assert await ending == 0
    await way.released(rig.spare, *rig.decode)


async def runs(worker: Worker, count: int) -> bool:
    return (await worker.load()).running == count
