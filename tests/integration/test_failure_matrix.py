"""The handoff's failure matrix: real processes, real signals, a real link, at every stage of a reply.

Whatever fails, the reply ends in the text of an undisturbed run, or in a typed error before its
deadline; then no block is in use: on live workers within two seconds, on a stopped one within two
seconds of SIGCONT. Cells wait more than they compute: groups of them may run at once, each with a rig
of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from tests.integration.failure_cells import (
    NUM_PROMPT_TOKENS,
    NUM_SLOW_PROMPT_TOKENS,
    SILENT,
    SLOW_BYTES_PER_S,
    STATUSES,
    Attempt,
    Blockers,
    Failure,
    State,
    chat_body,
    decode_request,
    reach,
    short_deadline_s,
    waiting_at,
)
from tests.integration.failure_rig import PING_S, PING_TIMEOUT_S, Rig, Worker, running_rig
from tests.integration.processes import READY_S
from tests.integration.reply_readers import DecodeReply, GatewayReply
from tests.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.matrix,
    pytest.mark.timeout(READY_S + 60),
    pytest.mark.asyncio(loop_scope="module"),
]

RELEASE_S = 2.0
AMPLE_S = 15.0
OF_A_WORKER = (Failure.KILL, Failure.STOP, Failure.STATUS)
OF_THE_LINK = (Failure.RESET, Failure.BLACK_HOLE, Failure.SLOW)


def cells(where: str, failures: Iterable[Failure]) -> list[Any]:
    """What runs one after the other, with `--dist loadgroup`, is what fails in one way at one place."""
    return [
        pytest.param(failure, id=f"{where}-{failure}", marks=pytest.mark.xdist_group(f"{where}-{failure}"))
        for failure in failures
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


@pytest.fixture
def blockers(rig: Rig) -> Iterator[Blockers]:
    blockers = Blockers(rig)
    yield blockers
    blockers.let_go()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(whole_rig: Rig) -> dict[int, DecodeReply]:
    """What a decode worker says to prompts of these lengths."""
    await whole_rig.ready()
    replies = {}
    for length in (NUM_PROMPT_TOKENS, NUM_SLOW_PROMPT_TOKENS):
        request = decode_request("undisturbed", [whole_rig.spare.address], length)
        reply = replies[length] = DecodeReply(whole_rig.decode[1].decode, request, AMPLE_S)
        await reply.ended()
        assert reply.complete
        assert len(reply.token_ids) == 40
    return replies


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


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("failure", cells("prefill", OF_A_WORKER) + cells("link", OF_THE_LINK))
async def test_prefill_or_the_link_to_it_fails(
    rig: Rig,
    blockers: Blockers,
    undisturbed: dict[int, DecodeReply],
    failure: Failure,
    state: State,
) -> None:
    """Of two replies one knows a spare and is continued; the other is told that nobody delivered in time."""
    num_tokens = NUM_SLOW_PROMPT_TOKENS if failure is Failure.SLOW else NUM_PROMPT_TOKENS
    expected = undisturbed[num_tokens]
    links = rig.relayed_links if failure is Failure.STATUS else rig.links
    is_late = failure in SILENT or failure is Failure.SLOW
    deadlines_s = [AMPLE_S, short_deadline_s(failure, state) if is_late else AMPLE_S]

    def start(n: int) -> DecodeReply:
        targets = [links[n].address, rig.spare.address][: 2 - n]
        request = decode_request(f"{failure}-{state}-{n}", targets, num_tokens)
        return DecodeReply(rig.decode[n].decode, request, deadlines_s[n])

    helped, alone = await reach(
        state,
        [Attempt(partial(start, n), links[n], num_tokens) for n in range(2)],
        prefill=rig.prefill,
        queue_at=[rig.prefill],
        blockers=blockers,
    )
    assert isinstance(helped, DecodeReply)
    assert isinstance(alone, DecodeReply)
    match failure:
        case Failure.KILL:
            rig.prefill.kill()
        case Failure.STOP:
            rig.prefill.stop()
        case Failure.STATUS:
            rig.prefill_relay.fail(STATUSES[state])
        case Failure.RESET:
            await asyncio.gather(*(link.reset() for link in links))
        case Failure.BLACK_HOLE:
            for link in links:
                link.go_black()
        case Failure.SLOW:
            for link in links:
                link.limit(SLOW_BYTES_PER_S)
            blockers.let_go()
    await alone.ended()
    assert alone.error == ("DEADLINE_EXCEEDED" if is_late else "UNAVAILABLE")
    # On a slow link the first token overtakes the pages; else it has come before the failure, or never.
    num_emitted = len(alone.token_ids) if failure is Failure.SLOW else int(state is State.ANSWERED)
    assert num_emitted <= 1
    assert alone.token_ids == expected.token_ids[:num_emitted]
    await helped.ended()
    assert (helped.error, helped.text) == (None, expected.text)
    assert helped.token_ids == expected.token_ids
    assert helped.finished is not None
    assert helped.finished.timings.prefill_attempts == (1 if failure is Failure.SLOW else 2)
    blockers.let_go()
    await released(rig, failure, None if failure in OF_THE_LINK else rig.prefill)


@pytest.mark.xdist_group("slow-transfer")
async def test_a_slow_transfer_is_not_a_silent_one(rig: Rig) -> None:
    """Longer than pings take to give somebody up; the first token waits for no page but those under way."""
    num_tokens = 24  # 4.4 MB
    rig.links[0].limit(SLOW_BYTES_PER_S)
    request = decode_request("slow", [rig.links[0].address], num_tokens)
    reply = DecodeReply(rig.decode[0].decode, request, AMPLE_S)
    await asyncio.wait_for(reply.seen_text.wait(), 2.5)
    await reply.ended()
    assert reply.complete
    assert reply.finished is not None
    assert reply.finished.timings.prefill_attempts == 1
    assert reply.took_s > PING_S + PING_TIMEOUT_S


@pytest.mark.parametrize("is_helped", [True, False], ids=["spare", "alone"])
@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("failure", cells("decode", OF_A_WORKER))
async def test_decode_fails(
    rig: Rig,
    blockers: Blockers,
    undisturbed_chat: GatewayReply,
    failure: Failure,
    state: State,
    is_helped: bool,  # noqa: FBT001  # a parameter of the cell
) -> None:
    """The gateway continues at the other decode worker; without one, it says so in the stream."""
    gateway, decode = rig.gateways["pair"], rig.decode
    if failure is Failure.STATUS:
        gateway = rig.gateways["relayed"]
    elif not is_helped:
        gateway, decode = rig.gateways["lonely"], rig.decode[:1]

    def start() -> GatewayReply:
        return GatewayReply(gateway.address, chat_body(f"{failure}-{state}-{is_helped}"), AMPLE_S)

    (reply,) = await reach(
        state, [Attempt(start, rig.links[0])], prefill=rig.prefill, queue_at=decode, blockers=blockers
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
                if worker is victim or not is_helped:
                    relay.fail(STATUSES[state])
    rig.links[0].heal()
    blockers.let_go()
    await reply.ended()
    assert reply.status == 200
    if is_helped:
        assert (reply.error, reply.text) == (None, undisturbed_chat.text)
        assert reply.complete
    else:
        assert reply.error == "decode_unavailable"
        words = undisturbed_chat.text.split()[: 1 if state is State.ANSWERED else 0]
        assert reply.text.split() == words
    await released(rig, failure, victim)
