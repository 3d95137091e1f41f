"""Oversleeping is noticed: a callback that holds the loop up shows."""

import time

import pytest

from bench.loop_lag import summarize, watched_loop
from tests.waiting import eventually


def test_summary() -> None:
    lag = summarize([0.001] * 98 + [0.02, 0.5])
    assert (lag.num_sleeps, lag.p50_s, lag.p99_s, lag.max_s) == (100, 0.001, 0.02, 0.5)
    with pytest.raises(ValueError, match="nothing"):
        summarize([])


async def test_a_blocked_loop_is_late() -> None:
    async with watched_loop() as late:
        await eventually(lambda: len(late) > 0)
        time.sleep(0.1)  # noqa: ASYNC251 - what the watcher is for
        await eventually(lambda: max(late) > 0.05)
