"""Waiting for a state, with a deadline, instead of sleeping until it is probably there."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

_POLL_S = 0.01


async def eventually(predicate: Callable[[], bool | Awaitable[bool]], timeout: float = 10.0) -> None:
    """Returns once the predicate holds; fails with its source after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        outcome = predicate()
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if outcome:
            return
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {_source(predicate)}")
        await asyncio.sleep(_POLL_S)


def eventually_sync(predicate: Callable[[], bool], timeout: float = 10.0) -> None:
    """`eventually` for tests without an event loop."""
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {timeout} s: {_source(predicate)}")
        time.sleep(_POLL_S)


def _source(predicate: Callable[[], object]) -> str:
    try:
        return inspect.getsource(predicate).strip()
    except OSError:
        return repr(predicate)
