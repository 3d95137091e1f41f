"""How late the event loop is: a task that sleeps a little, and by how much it oversleeps."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from bench.statistics import percentile


@dataclass(frozen=True, slots=True)
class LoopLag:
    """Seconds that a timer fired late, over all sleeps in a row."""

    num_sleeps: int
    p50_s: float
    p99_s: float
    max_s: float


@contextlib.asynccontextmanager
async def watched_loop(sleep_s: float = 0.005) -> AsyncIterator[list[float]]:
    """Collects oversleeps in seconds while the body runs."""
    late: list[float] = []
    task = asyncio.create_task(_watch(late, sleep_s))
    try:
        yield late
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch(late: list[float], sleep_s: float) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(sleep_s)
        late.append(time.perf_counter() - began - sleep_s)


def summarize(late: list[float]) -> LoopLag:
    """Raises ValueError if nothing was collected."""
    return LoopLag(len(late), percentile(late, 50), percentile(late, 99), max(late, default=0.0))
