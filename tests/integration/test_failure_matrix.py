"""The handoff's failure matrix: real processes, real signals, a real link, at every stage of a reply.

Whatever fails, the reply ends in the text of an undisturbed run, or in a typed error before its
deadline; then no block is in use: on live workers within two seconds, on a stopped one within two
seconds of SIGCONT.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.integration.failure_cells import (
    SLOW_BYTES_PER_S,
    STATUSES,
    Blockers,
    Failure,
    Help,
    State,
    chat_body,
    decode_request,
    reach,
    waiting_at,
)
from tests.integration.failure_rig import Rig, Worker, running_rig
from tests.integration.reply_readers import DecodeReply, GatewayReply
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.asyncio(loop_scope="module")]

RELEASE_S = 2.0
AMPLE_S = 15.0
# Nobody who is stopped or behind a black hole is found out before: pings take up to 6 s for that.
SHORT_S = 4.0
# Nearly 3 MB need nearly 3 s, of which something may have crossed before the link is slow.
TOO_SHORT_FOR_SLOW_S = {state: 2.4 if state is State.TRANSFERRING else 3.2 for state in State}

PREFILL_FAILURES = [
    pytest.param(failure, id=f"{where}-{failure}")
    for where, failures in (
        ("prefill", (Failure.KILL, Failure.STOP, Failure.STATUS)),
        ("link", (Failure.RESET, Failure.BLACK_HOLE, Failure.SLOW)),
    )
    for failure in failures
]
DECODE_FAILURES = [
    pytest.param(failure, id=f"decode-{failure}") for failure in (Failure.KILL, Failure.STOP, Failure.STATUS)
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def rig(whole_rig: Rig) -> AsyncIterator[Rig]:
    """Everybody there, everybody idle; nothing that one cell broke is left for the next."""
    await whole_rig.ready()
    yield whole_rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(whole_rig: Rig) -> DecodeReply:
    """What a decode worker says to a prompt of this length."""
    await whole_rig.ready()
    request = decode_request("undisturbed", [whole_rig.spare.address])
    reply = DecodeReply(whole_rig.decode[1].decode, request, AMPLE_S)
    await reply.ended()
    assert reply.complete
    assert len(reply.token_ids) == 40
    return reply


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed_chat(whole_rig: Rig) -> GatewayReply:
    """What a gateway says to a chat of this length."""
    await whole_rig.ready()
    reply = GatewayReply(whole_rig.gateways["pair"].address, chat_body("undisturbed"), AMPLE_S)
    await reply.ended()
    assert reply.complete
    return reply


async def released(rig: Rig, failure: Failure, victim: Worker | None) -> None:
    """Checks that nobody keeps a block; whom the failure has stopped goes on again for that."""
    is_down = victim is not None and failure in (Failure.KILL, Failure.STOP)
    live = [worker for worker in rig.workers if not (is_down and worker is victim)]
    await asyncio.gather(*(eventually(worker.is_idle, timeout=RELEASE_S) for worker in live))
    if victim is not None and failure is Failure.STOP:
        victim.resume()
        await eventually(victim.is_idle, timeout=RELEASE_S)


@pytest.mark.parametrize("help_", Help)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("failure", PREFILL_FAILURES)
async def test_prefill_or_the_link_to_it_fails(
    rig: Rig, undisturbed: DecodeReply, failure: Failure, state: State, help_: Help
) -> None:
    """Decode asks a spare if it knows one; else it says that nobody delivered, or its time is over."""
    link = rig.relayed_link if failure is Failure.STATUS else rig.link
    targets = [link.address, rig.spare.address] if help_ is Help.SPARE else [link.address]
    request = decode_request(f"{failure}-{state}-{help_}", targets)
    deadline_s, error = AMPLE_S, "UNAVAILABLE"
    if help_ is Help.ALONE and failure in (Failure.STOP, Failure.BLACK_HOLE, Failure.SLOW):
        deadline_s = TOO_SHORT_FOR_SLOW_S[state] if failure is Failure.SLOW else SHORT_S
        error = "DEADLINE_EXCEEDED"
    blockers = Blockers(rig)
    reply = await reach(
        state,
        lambda: DecodeReply(rig.decode[0].decode, request, deadline_s),
        link=link,
        prefill=rig.prefill,
        queue_at=[rig.prefill],
        blockers=blockers,
    )
    assert isinstance(reply, DecodeReply)
    match failure:
        case Failure.KILL:
            rig.prefill.kill()
        case Failure.STOP:
            rig.prefill.stop()
        case Failure.STATUS:
            rig.prefill_relay.fail(STATUSES[state])
        case Failure.RESET:
            await link.reset()
        case Failure.BLACK_HOLE:
            link.go_black()
        case Failure.SLOW:
            link.limit(SLOW_BYTES_PER_S)
            blockers.let_go()
    await reply.ended()
    # The kernel delivers what a dead worker has written, and that may be all of it.
    had_sent_all = failure in (Failure.KILL, Failure.STOP) and state is State.ANSWERED and reply.complete
    if help_ is Help.SPARE or had_sent_all:
        assert (reply.error, reply.text) == (None, undisturbed.text)
        assert reply.token_ids == undisturbed.token_ids
        assert reply.finished is not None
        attempts = reply.finished.timings.prefill_attempts
        assert attempts == (1 if failure is Failure.SLOW else 2) or (had_sent_all and attempts == 1)
    else:
        assert reply.error == error
        assert reply.token_ids == undisturbed.token_ids[: 1 if state is State.ANSWERED else 0]
    blockers.let_go()
    await released(rig, failure, None if failure in (Failure.RESET, Failure.BLACK_HOLE) else rig.prefill)


@pytest.mark.parametrize("help_", Help)
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("failure", DECODE_FAILURES)
async def test_decode_fails(
    rig: Rig, undisturbed_chat: GatewayReply, failure: Failure, state: State, help_: Help
) -> None:
    """The gateway continues at the other decode worker; without one, it says so in the stream."""
    gateway, decode = rig.gateways["pair"], rig.decode
    if failure is Failure.STATUS:
        gateway = rig.gateways["relayed"]
    elif help_ is Help.ALONE:
        gateway, decode = rig.gateways["lonely"], rig.decode[:1]
    blockers = Blockers(rig)
    reply = await reach(
        state,
        lambda: GatewayReply(gateway.address, chat_body(f"{failure}-{state}-{help_}"), AMPLE_S),
        link=rig.link,
        prefill=rig.prefill,
        queue_at=decode,
        blockers=blockers,
    )
    assert isinstance(reply, GatewayReply)
    victim = await waiting_at(decode)
    match failure:
        case Failure.KILL:
            victim.kill()
        case Failure.STOP:
            victim.stop()
        case Failure.STATUS:
            for worker, relay in zip(rig.decode, rig.decode_relays, strict=True):
                if worker is victim or help_ is Help.ALONE:
                    relay.fail(STATUSES[state])
    rig.link.heal()
    blockers.let_go()
    await reply.ended()
    assert reply.status == 200
    if help_ is Help.SPARE:
        assert (reply.error, reply.text) == (None, undisturbed_chat.text)
        assert reply.complete
    else:
        assert reply.error == "decode_unavailable"
        words = undisturbed_chat.text.split()[: 1 if state is State.ANSWERED else 0]
        assert reply.text.split() == words
    await released(rig, failure, victim)
