"""The processes that are measured: started before, watched meanwhile, ended after, whatever happens."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import grpc
from grpc import aio

from bench.errors import BenchFailed
from cli import interrupts, stack
from cli.errors import StartFailed
from cli.plan import Plan
from cli.processes import stop
from cli.run_folder import Entry, RunFolder

_READY_WITHIN_S = 300.0
_DRAIN_S = 8.0
_LOOK_EVERY_S = 0.5
_DYING_S = 0.5  # a process that dies loses its connections before it is gone

T = TypeVar("T")


@contextlib.contextmanager
def running(
    plan: Plan, environment: Mapping[str, str], progress: Callable[[str], None]
) -> Iterator[list[Entry]]:
    """Every process of the plan, ready. Leaves none behind, by whatever way the body is left.

    SIGTERM and SIGHUP end the body as Ctrl-C does. Raises StartFailed, with the log's last lines.
    """
    with TemporaryDirectory(prefix="baton-bench-") as folder, _all_signals_interrupt():
        run = RunFolder(Path(folder))
        run.path.mkdir()
        try:
            yield stack.start(
                run, plan, environment, _READY_WITHIN_S, lambda name, what: progress(f"{name} {what}")
            )
        finally:
            with interrupts.held_back():  # a second Ctrl-C must not keep the rest from being ended
                stop([entry.record for entry in run.entries()], _DRAIN_S)


async def watched(entries: Sequence[Entry], measuring: Coroutine[Any, Any, T]) -> T:
    """What the measurement gives, as long as every process lives.

    Raises StartFailed when one died, whatever the measurement made of that; BenchFailed for a call that
    failed although all of them live.
    """
    task = asyncio.create_task(measuring)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=_LOOK_EVERY_S)
            _check_alive(entries)
        return await task
    except (grpc.RpcError, BenchFailed) as error:
        await asyncio.sleep(_DYING_S)
        _check_alive(entries)
        if isinstance(error, BenchFailed):
            raise
        raise BenchFailed(f"a call failed: {_reason(error)}") from error
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _check_alive(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if not entry.record.is_alive():
            raise StartFailed(f"{entry.name} died while it was measured", stack.log_tail(entry))


def _reason(error: grpc.RpcError) -> str:
    """gRPC's two clients have a class each for it; the base of both does not know what failed."""
    if isinstance(error, grpc.Call | aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


@contextlib.contextmanager
def _all_signals_interrupt() -> Iterator[None]:
    signals = (signal.SIGTERM, signal.SIGHUP)
    heeded = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]
    before = [(signum, signal.signal(signum, _interrupt)) for signum in heeded]
    try:
        yield
    finally:
        for signum, handler in before:
            signal.signal(signum, handler)


def _interrupt(signum: int, frame: object) -> None:
    signal.raise_signal(signal.SIGINT)
