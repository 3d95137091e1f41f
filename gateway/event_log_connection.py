"""Talking to Redis: one way to connect, one way to run a script, one meaning of failure.

Invariant: no call hangs. Connect, socket and pool waits each end after their timeout, and whatever
keeps Redis from answering becomes LogUnavailable. Must not know: events, leases, replies' rules.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.event_log import LogUnavailable, ReplyUnknown
from gateway.event_log_lua import Script

TIMEOUT_S = 1.0


def connect(url: str, *, max_connections: int, socket_timeout_s: float = TIMEOUT_S) -> Any:
    """A client that answers bytes (Any: redis-py types sync and async, bytes and str as unions).

    No retries by redis-py: a second attempt would double every deadline.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=TIMEOUT_S,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)


async def run_script(redis: Any, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
    with unavailable():
        try:
            return await redis.evalsha(script.sha, len(keys), *keys, *args)
        except NoScriptError:  # a fresh or flushed server: EVAL runs the script and keeps it
            return await redis.eval(script.source, len(keys), *keys, *args)


@contextmanager
def cancellable() -> Iterator[None]:
    """Raises the cancellation that came during the call, should redis-py have lost it.

    Before Python 3.12 `asyncio.wait_for`, in which redis-py sends, may swallow one.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


@contextmanager
def unavailable() -> Iterator[None]:
    """Whatever keeps Redis from answering as asked (down, stalled, loading, full, read-only).

    A key of another type is no reply: ReplyUnknown, so that one such key is not taken for an outage.
    """
    try:
        with cancellable():
            yield
    except (RedisError, OSError) as error:
        if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
            raise ReplyUnknown(f"redis: {error}") from error
        raise LogUnavailable(f"redis: {error!r}") from error
