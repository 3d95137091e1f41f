"""Workers that are there and fail, as generations meet them: shut out, probed, let in again."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from baton.v1 import common_pb2, decode_pb2
from gateway.errors import GatewayError, Unavailable
from gateway.routing.circuit_breaker import THRESHOLD
from gateway.sampling import Sampling
from services.rpc.status import FAILED_TARGETS_KEY, REASON_KEY
from tests.fake_decode import FakeWorker, Script, text
from tests.unit.gateway.generating import NUM_TOKENS, SPEC, Gateway, error_of, gateway, refusing, text_of
from tests.waiting import eventually

BUSY = common_pb2.Load(running=7, blocks_total=1000)


def spare() -> FakeWorker:
    """Works, and is asked only after those without load."""
    return FakeWorker(script=Script(load=BUSY))


def breaker(gw: Gateway, worker: FakeWorker) -> str:
    (state,) = [w.breaker for w in gw.router.worker_states if w.address == worker.address]
    return state


async def open_breaker(gw: Gateway, worker: FakeWorker) -> None:
    for _ in range(THRESHOLD):
        reply = await gw.finished()
        assert text_of(reply) == text(NUM_TOKENS)  # the spare stands in, and the client sees nothing
    assert breaker(gw, worker) == "open"


BREAKAGES: list[Callable[[Script], None]] = []


def breakage(function: Callable[[Script], None]) -> Callable[[Script], None]:
    BREAKAGES.append(function)
    return function


@breakage
def refuses(script: Script) -> None:
    script.refuse = (grpc.StatusCode.INTERNAL, "as scripted", "")


@breakage
def unavailable(script: Script) -> None:
    script.refuse = (grpc.StatusCode.UNAVAILABLE, "as scripted", "")


@breakage
def dies_midway(script: Script) -> None:
    script.die_after, script.die_with = 3, grpc.StatusCode.INTERNAL


@breakage
def ends_without_finished(script: Script) -> None:
    script.end_after = 2


@pytest.mark.parametrize("break_", BREAKAGES, ids=lambda function: function.__name__)
async def test_a_worker_that_keeps_failing_gets_nothing_until_a_probe_succeeds(
    break_: Callable[[Script], None],
) -> None:
    broken = FakeWorker()
    break_(broken.script)
    async with gateway(broken, spare()) as gw:
        await open_breaker(gw, broken)
        num_asked = len(broken.requests)
        assert num_asked == THRESHOLD
        assert text_of(await gw.finished()) == text(NUM_TOKENS)
        assert len(broken.requests) == num_asked
        broken.script.refuse = broken.script.die_after = broken.script.end_after = None
        await eventually(lambda: breaker(gw, broken) == "half-open")
        await gw.finished()
        assert breaker(gw, broken) == "closed"
        assert len(broken.requests) == num_asked + 1


async def test_half_open_lets_one_request_in() -> None:
    broken = FakeWorker(script=Script(refuse=(grpc.StatusCode.INTERNAL, "", "")))
    async with gateway(broken, spare()) as gw:
        await open_breaker(gw, broken)
        broken.script.refuse = None
        broken.script.first_delay_s = 30.0
        await eventually(lambda: breaker(gw, broken) == "half-open")
        probe = await gw.start()
        for _ in range(3):
            assert text_of(await gw.finished()) == text(NUM_TOKENS)
        assert len(broken.requests) == THRESHOLD + 1
        probe.request_stop("cancelled")  # which says nothing: the next one is the probe
        await eventually(lambda: probe.settled)
        broken.script.first_delay_s = 0.0
        await gw.finished()
        assert breaker(gw, broken) == "closed"


@pytest.mark.parametrize(
    ("code", "field"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ""),
        (grpc.StatusCode.INVALID_ARGUMENT, "stop"),
        (grpc.StatusCode.FAILED_PRECONDITION, "fingerprint"),
        (grpc.StatusCode.ABORTED, ""),
    ],
)
async def test_what_is_no_fault_opens_nothing(code: grpc.StatusCode, field: str) -> None:
    worker = refusing(code, field)
    async with gateway(worker) as gw:
        for _ in range(2 * THRESHOLD):
            with pytest.raises(GatewayError):
                await gw.start()
        assert breaker(gw, worker) == "closed"


async def test_clients_that_cancel_open_nothing() -> None:
    worker = FakeWorker(script=Script(token_delay_s=5.0))
    async with gateway(worker) as gw:
        for _ in range(2 * THRESHOLD):
            reply = await gw.start()
            reply.request_stop("cancelled")
            await eventually(lambda reply=reply: reply.settled)
        assert breaker(gw, worker) == "closed"


async def test_a_request_that_breaks_its_worker_opens_nothing_by_being_tried_again() -> None:
    worker = FakeWorker(script=Script(die_after=1, die_with=grpc.StatusCode.INTERNAL))
    async with gateway(worker) as gw:
        assert text_of(await gw.finished()) == text(NUM_TOKENS)
        assert len(worker.requests) > THRESHOLD
        assert breaker(gw, worker) == "closed"


async def test_with_every_breaker_open_the_least_bad_is_used() -> None:
    workers = [FakeWorker(script=Script(refuse=(grpc.StatusCode.INTERNAL, "", ""))) for _ in range(2)]
    async with gateway(*workers) as gw:
        for _ in range(THRESHOLD):
            with pytest.raises(GatewayError):
                await gw.start()
        assert [breaker(gw, worker) for worker in workers] == ["open", "open"]
        for worker in workers:
            worker.script.refuse = None
        assert text_of(await gw.finished()) == text(NUM_TOKENS)


async def test_a_restarted_worker_starts_clean() -> None:
    broken = FakeWorker(script=Script(refuse=(grpc.StatusCode.INTERNAL, "", "")))
    async with gateway(broken, spare()) as gw:
        await open_breaker(gw, broken)
        broken.script.refuse = None
        await broken.kill()
        await eventually(lambda: gw.router.heard_at(broken.address) is None)
        await broken.start()
        await eventually(lambda: gw.router.heard_at(broken.address) is not None)
        assert breaker(gw, broken) == "closed"


async def test_a_worker_that_lives_and_admits_nobody_costs_no_request_and_is_shut_out() -> None:
    stuck = FakeWorker(script=Script(admit_delay_s=60.0))
    async with gateway(stuck, spare(), admit_timeout_s=0.8) as gw:
        await open_breaker(gw, stuck)
        assert len(stuck.requests) == THRESHOLD


async def test_a_probe_that_is_not_admitted_holds_its_request_up_for_a_moment_only() -> None:
    broken = FakeWorker(script=Script(refuse=(grpc.StatusCode.INTERNAL, "", "")))
    async with gateway(broken, spare(), admit_timeout_s=20.0) as gw:
        await open_breaker(gw, broken)
        broken.script.admit_delay_s = 60.0
        await eventually(lambda: breaker(gw, broken) == "half-open")
        started = time.monotonic()
        await gw.start()
        assert 1.0 < time.monotonic() - started < 4.0
        assert breaker(gw, broken) == "open"


async def test_nobody_is_asked_when_the_time_to_admit_is_over() -> None:
    workers = [FakeWorker(script=Script(admit_delay_s=60.0)) for _ in range(3)]
    async with gateway(*workers, admit_timeout_s=0.4) as gw:
        with pytest.raises(Unavailable):
            await gw.start()
        assert [len(worker.requests) for worker in workers].count(0) == 1


# --- silence, on a clock that lets 0.3 s of it pass for half a minute


def hurried() -> float:
    return 100 * time.monotonic()


@pytest.mark.parametrize("stall_after", [0, 3])
async def test_a_worker_that_admits_and_then_says_nothing_is_shut_out(stall_after: int) -> None:
    mute = FakeWorker(script=Script(stall_after=stall_after))
    async with gateway(mute, router_clock=hurried) as gw:
        for _ in range(THRESHOLD):
            assert breaker(gw, mute) == "closed"
            reply = await gw.finished(replace(SPEC, timeout_s=0.3))
            assert error_of(reply)["code"] == "timeout"
        assert breaker(gw, mute) != "closed"


async def test_a_worker_that_talks_to_others_or_works_meanwhile_is_not() -> None:
    busy = FakeWorker(script=Script(token_delay_s=0.05))
    async with gateway(busy, router_clock=hurried) as gw:
        others = await gw.start(replace(SPEC, sampling=Sampling(max_tokens=200)))
        await eventually(lambda: len(others.events) > 5)
        busy.script.first_delay_s = 60.0
        for _ in range(THRESHOLD):
            await gw.finished(replace(SPEC, timeout_s=0.3))
        assert breaker(gw, busy) == "closed"
        others.request_stop("cancelled")
        await eventually(lambda: others.settled)
        for _ in range(THRESHOLD):
            reply = await gw.start(replace(SPEC, timeout_s=0.3))
            while not reply.settled:
                busy.script.load.prompt_tokens_computed += 256
                await asyncio.sleep(0.02)
        assert breaker(gw, busy) == "closed"


# --- draining


async def test_a_request_that_meets_a_worker_on_its_way_down_goes_elsewhere_unnoticed() -> None:
    """The load report still says that it takes work."""
    drains = FakeWorker(
        script=Script(refuse=(grpc.StatusCode.UNAVAILABLE, "draining", ""), metadata={REASON_KEY: "Draining"})
    )
    async with gateway(drains, spare()) as gw:
        for _ in range(2 * THRESHOLD):
            assert text_of(await gw.finished()) == text(NUM_TOKENS)
        assert breaker(gw, drains) == "closed"
        assert len(drains.requests) < 2 * THRESHOLD  # its own word is believed until the next report
        (state,) = [w.state for w in gw.router.worker_states if w.address == drains.address]
        assert state in ("draining", "up")


# --- prefill workers, of which the gateway only hears


def prefill_pair() -> tuple[FakeWorker, FakeWorker]:
    first = FakeWorker(role=common_pb2.ROLE_PREFILL)
    return first, FakeWorker(role=common_pb2.ROLE_PREFILL, script=Script(load=BUSY))


async def test_a_prefill_worker_that_decode_reports_moves_behind_its_spares_and_back() -> None:
    decode, (bad, good) = FakeWorker(), prefill_pair()
    async with gateway(decode, prefill=(bad, good)) as gw:
        decode.script.timings = decode_pb2.FirstTextTimings(
            prefill_target=good.address, failed_prefill_targets=[bad.address]
        )
        for _ in range(THRESHOLD):
            await gw.finished()
            assert decode.requests[-1].prefill_targets[0] == bad.address
        assert breaker(gw, bad) == "open"
        assert breaker(gw, decode) == "closed"
        decode.script.timings = decode_pb2.FirstTextTimings(prefill_target=good.address)
        await gw.finished()
        assert list(decode.requests[-1].prefill_targets) == [good.address, bad.address]
        await eventually(lambda: breaker(gw, bad) == "half-open")
        decode.script.timings = decode_pb2.FirstTextTimings(prefill_target=bad.address)
        await gw.finished()
        assert decode.requests[-1].prefill_targets[0] == bad.address
        assert breaker(gw, bad) == "closed"


async def test_decode_is_not_blamed_when_no_prefill_worker_delivers() -> None:
    decode, (bad, good) = FakeWorker(), prefill_pair()
    async with gateway(decode, prefill=(bad, good)) as gw:
        decode.script.refuse = (grpc.StatusCode.UNAVAILABLE, "no prefill worker delivered", "")
        decode.script.metadata = {REASON_KEY: "PrefillUnavailable", FAILED_TARGETS_KEY: bad.address}
        for number in range(THRESHOLD):
            with pytest.raises(GatewayError):
                await gw.start(replace(SPEC, seed=number))
        assert breaker(gw, decode) == "closed"
        assert breaker(gw, bad) == "open"
        assert breaker(gw, good) == "closed"
