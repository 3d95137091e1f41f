"""Who is blamed for a call, and who is not."""

from random import Random

import grpc
import pytest
from grpc import aio

from baton.v1 import decode_pb2
from gateway.routing.circuit_breaker import SILENT_S, THRESHOLD, BreakerState, CircuitBreaker
from gateway.routing.holds import Holds
from gateway.routing.outcome import Blame, RouteOutcome
from services.rpc.status import FAILED_TARGETS_KEY, REASON_KEY


def rpc_error(code: grpc.StatusCode, **metadata: str) -> aio.AioRpcError:
    trailing = aio.Metadata(*((key.replace("_", "-"), value) for key, value in metadata.items()))
    return aio.AioRpcError(code, aio.Metadata(), trailing, "as scripted")


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.decode, self.p1, self.p2 = (
            CircuitBreaker(name, clock=lambda: self.now, random=Random(1)) for name in ("d", "p1", "p2")
        )
        self.num_drains = 0
        self.decode_holds, self.prefill_holds = Holds(), Holds()

    def outcome(self, cause: str) -> RouteOutcome:
        prefill = {"p1": self.p1.begin(cause), "p2": self.p2.observe(cause)}
        return RouteOutcome(
            self.decode.begin(cause),
            prefill,
            decode_hold=self.decode_holds.take(),
            prefill_hold=self.prefill_holds.take(),
            on_draining=self._drains,
        )

    def _drains(self) -> None:
        self.num_drains += 1

    @property
    def open(self) -> set[str]:
        named = {"d": self.decode, "p1": self.p1, "p2": self.p2}
        return {name for name, breaker in named.items() if breaker.state is BreakerState.OPEN}


@pytest.mark.parametrize(
    ("code", "is_fault"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.INTERNAL, True),
        (grpc.StatusCode.UNKNOWN, True),
        (grpc.StatusCode.DATA_LOSS, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, True),
        (grpc.StatusCode.CANCELLED, False),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        (grpc.StatusCode.FAILED_PRECONDITION, False),
        (grpc.StatusCode.ABORTED, False),
    ],
)
def test_which_statuses_speak_against_a_worker(code: grpc.StatusCode, *, is_fault: bool) -> None:
    assert Blame.of_rpc(rpc_error(code)).decode is is_fault
    world = World()
    for number in range(THRESHOLD):
        world.outcome(f"r{number}").failed(Blame.of_rpc(rpc_error(code)))
    assert world.open == ({"d"} if is_fault else set())


def test_a_draining_worker_is_not_to_blame_and_is_noted() -> None:
    world = World()
    blame = Blame.of_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, **{REASON_KEY: "Draining"}))
    for number in range(THRESHOLD):
        world.outcome(f"r{number}").failed(blame)
    assert world.open == set()
    assert world.num_drains == THRESHOLD


def test_decode_is_not_to_blame_for_prefill() -> None:
    world = World()
    metadata = {REASON_KEY: "PrefillUnavailable", FAILED_TARGETS_KEY: "p1,p2,stranger"}
    for number in range(THRESHOLD):
        world.outcome(f"r{number}").failed(Blame.of_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, **metadata)))
    assert world.open == {"p1", "p2"}


def answer_another_decode_worker(world: World, number: int) -> None:
    world.p2.observe(f"other-{number}").answered()


def test_a_decode_worker_that_alone_cannot_reach_prefill_is_to_blame_itself() -> None:
    """Whether it runs the prompt itself, or may not."""
    metadata = {REASON_KEY: "PrefillUnavailable", FAILED_TARGETS_KEY: "p1,p2"}
    blame = Blame.of_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, **metadata))
    timings = decode_pb2.FirstTextTimings(prefill_target="local", failed_prefill_targets=["p1", "p2"])

    def is_refused(world: World, outcome: RouteOutcome) -> None:
        outcome.failed(blame)

    def runs_it_here(world: World, outcome: RouteOutcome) -> None:
        outcome.answered(timings)
        world.now += 2 * SILENT_S  # a long reply: what others hear of prefill meanwhile changes nothing
        outcome.finished(timings)

    for end in (is_refused, runs_it_here):
        world = World()
        for number in range(THRESHOLD):
            answer_another_decode_worker(world, number)
            end(world, world.outcome(f"r{number}"))
        assert world.decode.num_openings == 1
        assert world.p1.num_openings == world.p2.num_openings == 0


def test_prefill_workers_that_answer_nobody_or_send_wrong_pages_are_to_blame_together() -> None:
    local = decode_pb2.FirstTextTimings(prefill_target="local", failed_prefill_targets=["p1", "p2"])
    dead = World()
    for number in range(THRESHOLD):
        outcome = dead.outcome(f"r{number}")
        outcome.answered(local)
        outcome.finished(local)
    assert dead.open == {"p1", "p2"}
    lying = World()
    for number in range(THRESHOLD):
        answer_another_decode_worker(lying, number)
        outcome = lying.outcome(f"r{number}")
        outcome.answered(decode_pb2.FirstTextTimings(prefill_target="p1"))
        outcome.finished(local)
    assert lying.open == {"p1", "p2"}


def test_a_decode_worker_without_a_way_makes_no_probe_of_prefill_wait() -> None:
    world = World()
    for number in range(THRESHOLD):
        world.p1.begin(f"early-{number}").failed()
    world.now += 2.0
    answer_another_decode_worker(world, 0)
    outcome = world.outcome("r")
    assert not world.p1.lets_in()
    outcome.answered(decode_pb2.FirstTextTimings(failed_prefill_targets=["p1", "p2"]))
    assert world.p1.lets_in()


def test_a_prompt_that_decode_runs_itself_is_no_probe_of_prefill() -> None:
    world = World()
    for number in range(THRESHOLD):
        world.p1.begin(f"early-{number}").failed()
    world.now += 2.0
    outcome = world.outcome("r")
    assert not world.p1.lets_in()
    outcome.answered(decode_pb2.FirstTextTimings(prefill_target="local"))
    world.now += 2 * SILENT_S  # a long reply, in which nobody asks for prefill
    assert world.p1.lets_in()
    assert world.p1.num_openings == 1


def test_a_prefill_worker_that_another_stood_in_for_is_counted_once_a_call() -> None:
    world = World()
    timings = decode_pb2.FirstTextTimings(prefill_target="p2", failed_prefill_targets=["p1"])
    for number in range(THRESHOLD):
        outcome = world.outcome(f"r{number}")
        outcome.answered(timings)
        outcome.finished(timings)  # says the same again
        assert world.open == ({"p1"} if number == THRESHOLD - 1 else set())


def test_a_first_token_whose_pages_never_came_is_no_success() -> None:
    world = World()
    for number in range(THRESHOLD):
        outcome = world.outcome(f"r{number}")
        outcome.answered(decode_pb2.FirstTextTimings(prefill_target="p1"))
        outcome.finished(decode_pb2.FirstTextTimings(prefill_target="p1", failed_prefill_targets=["p1"]))
    assert world.open == {"p1"}


def test_after_the_first_word_nothing_counts() -> None:
    world = World()
    for number in range(THRESHOLD):
        outcome = world.outcome(f"r{number}")
        outcome.dropped()
        outcome.failed(Blame(decode=True, prefill_targets=("p1",)))
    assert world.open == set()


def test_a_call_counts_as_load_until_it_ends_at_prefill_until_it_has_answered() -> None:
    world = World()
    outcome = world.outcome("r")
    assert (world.decode_holds.num, world.prefill_holds.num) == (1, 1)
    outcome.answered(decode_pb2.FirstTextTimings())
    assert (world.decode_holds.num, world.prefill_holds.num) == (1, 0)
    outcome.finished(decode_pb2.FirstTextTimings())
    assert world.decode_holds.num == 0


def test_a_call_that_fails_or_is_dropped_is_no_load_either() -> None:
    for end in (lambda outcome: outcome.failed(Blame()), lambda outcome: outcome.dropped()):
        world = World()
        end(world.outcome("r"))
        assert (world.decode_holds.num, world.prefill_holds.num) == (0, 0)


def test_a_call_is_there_once_it_is_admitted_and_until_it_ends() -> None:
    world = World()
    outcome = world.outcome("r")
    assert (world.decode_holds.num_there, world.prefill_holds.num_there) == (0, 0)
    outcome.admitted()
    outcome.admitted()
    assert (world.decode_holds.num_there, world.prefill_holds.num_there) == (1, 1)
    outcome.dropped()
    outcome.dropped()
    outcome.admitted()
    assert (world.decode_holds.num_there, world.prefill_holds.num_there) == (0, 0)
    assert (world.decode_holds.num, world.prefill_holds.num) == (0, 0)
