"""Jobs run in order, off the event loop; a failure ends them, and after `stop` none runs."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.kv.background import Background
from tests.waiting import eventually


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


async def test_jobs_run_in_order_elsewhere_and_every_change_is_told(threads: ThreadPoolExecutor) -> None:
    changed = asyncio.Event()
    jobs = Background(threads, changed.set)
    done: list[int] = []
    where: set[str] = set()

    def job(number: int) -> None:
        where.add(threading.current_thread().name)
        done.append(number)

    for number in range(100):
        jobs.start(lambda number=number: job(number))  # type: ignore[misc]
        if number % 7 == 0:
            await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while jobs.num_unfinished:
            changed.clear()
            if jobs.num_unfinished:
                await changed.wait()
    assert done == list(range(100))
    assert threading.current_thread().name not in where


async def test_what_a_job_raises_is_raised_by_the_next_call_and_ends_the_rest(
    threads: ThreadPoolExecutor,
) -> None:
    jobs = Background(threads, lambda: None)
    ran = []

    def fail() -> None:
        raise ValueError("scripted")

    jobs.start(fail)
    jobs.start(lambda: ran.append(1))

    def has_failed() -> bool:
        try:
            jobs.check()
        except ValueError:
            return True
        return False

    await eventually(has_failed)
    with pytest.raises(ValueError, match="scripted"):
        jobs.start(lambda: ran.append(2))
    await jobs.stop()
    assert ran == []


async def test_stopping_waits_for_the_job_in_progress_and_drops_the_rest(threads: ThreadPoolExecutor) -> None:
    jobs = Background(threads, lambda: None)
    begun, go_on = threading.Event(), threading.Event()
    ran = []

    def hold() -> None:
        begun.set()
        go_on.wait(10)
        ran.append("first")

    jobs.start(hold)
    jobs.start(lambda: ran.append("second"))
    assert await asyncio.to_thread(begun.wait, 10)
    stopping = asyncio.create_task(jobs.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    go_on.set()
    await asyncio.wait_for(stopping, 10)
    assert ran == ["first"]
    jobs.start(lambda: ran.append("third"))
    await jobs.stop()
    assert ran == ["first"]


async def test_a_job_that_nobody_started_in_time_is_not_forgotten(threads: ThreadPoolExecutor) -> None:
    """Started again and again just when the thread has found nothing more to do."""
    jobs = Background(threads, lambda: None)
    ran = []
    for number in range(60):
        jobs.start(lambda number=number: ran.append(number))  # type: ignore[misc]
        await eventually(lambda number=number: len(ran) > number)  # type: ignore[misc]
    assert ran == list(range(60))


async def test_nobody_keeps_a_thread_that_others_wait_for(threads: ThreadPoolExecutor) -> None:
    order: list[str] = []
    greedy: Background

    def again() -> None:
        if len(order) < 50:
            greedy.start(lambda: order.append("greedy"))

    greedy = Background(threads, again)
    modest = Background(threads, lambda: None)
    greedy.start(lambda: order.append("greedy"))
    modest.start(lambda: order.append("modest"))
    await eventually(lambda: len(order) >= 50)
    assert order.index("modest") < 10
    await greedy.stop()
