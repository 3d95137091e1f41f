"""A breaker's states on a clock that the test turns."""

from random import Random

import pytest

from gateway.routing.circuit_breaker import (
    FIRST_BACKOFF_S,
    FORGIVEN_AFTER,
    LAST_BACKOFF_S,
    SILENT_S,
    THRESHOLD,
    BreakerState,
    CircuitBreaker,
)


class World:
    """A breaker, and calls on behalf of ever new replies."""

    def __init__(self) -> None:
        self.now = 100.0
        self.breaker = CircuitBreaker("10.0.0.1:1", clock=lambda: self.now, random=Random(1))
        self.num_replies = 0

    def begin(self):  # type: ignore[no-untyped-def]
        self.num_replies += 1
        return self.breaker.begin(f"reply-{self.num_replies}")

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.begin().failed()

    def open(self) -> None:
        self.fail(THRESHOLD)
        assert self.breaker.state is BreakerState.OPEN

    def pass_backoff(self) -> float:
        """Turns the clock until the breaker is half-open; returns how long that took."""
        started = self.now
        while self.breaker.state is BreakerState.OPEN:
            self.now += 0.01
        return self.now - started


@pytest.fixture
def world() -> World:
    return World()


def test_failures_in_a_row_open_it(world: World) -> None:
    world.fail(THRESHOLD - 1)
    assert world.breaker.lets_in()
    world.fail()
    assert world.breaker.state is BreakerState.OPEN
    assert not world.breaker.lets_in()


def test_a_success_between_them_starts_the_count_again(world: World) -> None:
    for _ in range(3):
        world.fail(THRESHOLD - 1)
        world.begin().succeeded()
    assert world.breaker.state is BreakerState.CLOSED


def test_a_worker_that_begins_every_reply_and_ends_none_is_broken_too(world: World) -> None:
    for _ in range(THRESHOLD):
        begun = [world.begin() for _ in range(2 * FORGIVEN_AFTER)]
        for trial in begun:
            trial.answered()
        begun[0].failed()
        assert world.breaker.state is BreakerState.CLOSED
    for trial in begun[1 : THRESHOLD + 1]:
        trial.failed()
    assert world.breaker.state is BreakerState.OPEN


def test_many_replies_that_begin_well_clear_the_record_before_one_ends(world: World) -> None:
    for _ in range(2 * THRESHOLD):
        world.fail()
        for _ in range(FORGIVEN_AFTER):
            world.begin().answered()
    assert world.breaker.num_openings == 0


def test_a_few_that_begin_well_do_not(world: World) -> None:
    for _ in range(THRESHOLD - 1):
        world.fail()
        for _ in range(FORGIVEN_AFTER - 1):
            world.begin().answered()
    world.fail()
    assert world.breaker.state is BreakerState.OPEN


def test_many_that_begin_well_after_the_probe_end_the_parole(world: World) -> None:
    world.open()
    world.pass_backoff()
    for _ in range(FORGIVEN_AFTER):
        world.begin().answered()
    world.fail()
    assert world.breaker.state is BreakerState.CLOSED


def test_one_reply_that_begins_many_times_is_one_answer(world: World) -> None:
    world.fail(THRESHOLD - 1)
    for _ in range(FORGIVEN_AFTER):
        world.breaker.begin("choices").answered()
    world.fail()
    assert world.breaker.state is BreakerState.OPEN


def test_one_reply_that_breaks_workers_opens_none(world: World) -> None:
    for _ in range(10 * THRESHOLD):
        world.breaker.begin("poison").failed()
    assert world.breaker.state is BreakerState.CLOSED


def test_what_ends_without_a_verdict_counts_for_nothing(world: World) -> None:
    world.fail(THRESHOLD - 1)
    for _ in range(5):
        world.begin().dropped()
    assert world.breaker.state is BreakerState.CLOSED
    world.fail()
    assert world.breaker.state is BreakerState.OPEN


def test_half_open_lets_one_probe_in_and_its_answer_everybody(world: World) -> None:
    world.open()
    world.pass_backoff()
    assert world.breaker.state is BreakerState.HALF_OPEN
    assert world.breaker.lets_in()
    probe = world.begin()
    assert not world.breaker.lets_in()
    probe.answered()
    assert world.breaker.state is BreakerState.CLOSED
    assert world.breaker.lets_in()


def test_after_the_probe_the_next_failure_opens_it_again_for_longer(world: World) -> None:
    world.open()
    first_s = world.pass_backoff()
    world.begin().answered()
    world.fail()
    assert world.breaker.state is BreakerState.OPEN
    assert FIRST_BACKOFF_S / 2 <= first_s <= FIRST_BACKOFF_S + 0.02
    assert world.pass_backoff() + 0.01 >= FIRST_BACKOFF_S


def test_a_call_that_ended_well_clears_the_record(world: World) -> None:
    world.open()
    world.pass_backoff()
    world.begin().succeeded()
    world.fail(THRESHOLD - 1)
    assert world.breaker.state is BreakerState.CLOSED


def test_failing_probes_double_the_backoff_up_to_its_end(world: World) -> None:
    world.open()
    waits = []
    for _ in range(9):
        waits.append(world.pass_backoff())
        world.fail()
    for number, wait_s in enumerate(waits):
        whole_s = min(FIRST_BACKOFF_S * 2**number, LAST_BACKOFF_S)
        assert whole_s / 2 - 0.02 <= wait_s <= whole_s + 0.02


def test_jitter_keeps_gateways_out_of_step() -> None:
    waits = set()
    for seed in range(20):
        world = World()
        world.breaker = CircuitBreaker("w", clock=lambda world=world: world.now, random=Random(seed))
        world.open()
        waits.add(round(world.pass_backoff(), 2))
    assert len(waits) > 10


def test_a_dropped_probe_makes_room_for_another(world: World) -> None:
    world.open()
    world.pass_backoff()
    other = world.begin()
    world.begin().dropped()
    assert not world.breaker.lets_in()  # only the probe itself can
    other.dropped()
    assert world.breaker.lets_in()


def test_a_probe_that_nobody_hears_of_has_failed(world: World) -> None:
    world.open()
    for number in range(1, 6):
        world.pass_backoff()
        assert world.breaker.lets_in()
        world.begin()
        world.now += SILENT_S - 0.1
        assert world.breaker.state is BreakerState.HALF_OPEN
        assert not world.breaker.lets_in()
        world.now += 0.2
        assert not world.breaker.lets_in()
        assert world.breaker.state is BreakerState.OPEN
        whole_s = min(FIRST_BACKOFF_S * 2**number, LAST_BACKOFF_S)
        assert whole_s / 2 - 0.02 <= world.pass_backoff() <= whole_s + 0.02


def test_a_probe_may_take_its_time_while_the_worker_does_something(world: World) -> None:
    world.open()
    world.pass_backoff()
    probe = world.begin()
    for _ in range(5):
        world.now += SILENT_S - 0.1
        world.breaker.heard()
        assert not world.breaker.lets_in()
    probe.answered()
    assert world.breaker.state is BreakerState.CLOSED


def give_up(world: World, *, after_s: float, heard_after_s: float | None = None) -> None:
    trial, started = world.begin(), world.now
    if heard_after_s is not None:
        world.now = started + heard_after_s
        world.breaker.heard()
    world.now = started + after_s
    trial.given_up()


def test_a_call_given_up_while_the_worker_is_silent_is_a_failure(world: World) -> None:
    for _ in range(THRESHOLD):
        give_up(world, after_s=SILENT_S)
    assert world.breaker.state is BreakerState.OPEN


def test_a_call_given_up_in_a_queue_or_early_is_none(world: World) -> None:
    for _ in range(THRESHOLD):
        give_up(world, after_s=SILENT_S - 0.1)
        give_up(world, after_s=2 * SILENT_S, heard_after_s=SILENT_S + 0.1)
    assert world.breaker.state is BreakerState.CLOSED


def test_calls_from_before_the_opening_say_nothing(world: World) -> None:
    good, bad = world.begin(), world.begin()
    world.open()
    good.succeeded()
    assert world.breaker.state is BreakerState.OPEN
    world.pass_backoff()
    bad.failed()
    assert world.breaker.state is BreakerState.HALF_OPEN


def test_a_call_let_in_for_want_of_a_better_worker_closes_it(world: World) -> None:
    world.open()
    world.begin().succeeded()
    assert world.breaker.state is BreakerState.CLOSED


def test_another_process_starts_clean(world: World) -> None:
    world.open()
    late = world.begin()
    world.breaker.reset()
    late.failed()
    world.fail(THRESHOLD - 1)
    assert world.breaker.state is BreakerState.CLOSED


def test_what_the_process_before_answered_is_no_sign_of_its_successor(world: World) -> None:
    trial = world.begin()
    trial.answered()
    assert trial.answers_others
    world.breaker.reset()
    assert not world.begin().answers_others


def test_its_state_can_be_read_in_another_thread_while_the_loop_changes_it() -> None:
    is_read = False

    def clock() -> float:
        if is_read:
            breaker.reset()  # as if the loop ran between two steps of the reader
        return 0.0

    breaker = CircuitBreaker("10.0.0.1:1", clock=clock, random=Random(1))
    for number in range(THRESHOLD):
        breaker.begin(f"reply-{number}").failed()
    is_read = True
    assert breaker.state is BreakerState.OPEN
    assert breaker.state is BreakerState.CLOSED
