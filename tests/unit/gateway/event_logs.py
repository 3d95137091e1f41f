"""Both homes of the event log, each as one store that several gateways open."""

import uuid
from contextlib import AsyncExitStack
from typing import Any, Protocol, Self

from gateway.event_log import AppendOutcome, AppendResult, EventLog, PendingAppend, ReplyMeta
from gateway.event_log_memory import MemoryEventLog, MemoryStore
from gateway.event_log_redis import RedisEventLog
from gateway.events import Event, EventKind, ReplyStatus
from tests.redis_server import RedisServer

APPENDED, DUPLICATE = AppendOutcome.APPENDED, AppendOutcome.DUPLICATE
GAP, FENCED = AppendOutcome.GAP, AppendOutcome.FENCED


class LogHome(Protocol):
    """A store; leaving the context closes every log opened on it."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def open(self, gateway_id: str = "g1", **settings: Any) -> EventLog:
        """The log as one gateway sees it, started."""
        ...

    def lose_data(self) -> None: ...


class MemoryHome:
    def __init__(self) -> None:
        self._store = MemoryStore()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def open(self, gateway_id: str = "g1", **settings: Any) -> EventLog:
        return MemoryEventLog(gateway_id, store=self._store, **settings)

    def lose_data(self) -> None:
        self._store.entries.clear()
        self._store.tombstones.clear()


class RedisHome:
    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._logs = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._logs.aclose()

    async def open(self, gateway_id: str = "g1", **settings: Any) -> EventLog:
        log = RedisEventLog(self._server.url, gateway_id, **settings)
        self._logs.push_async_callback(log.close)
        await log.start()
        return log

    def lose_data(self) -> None:
        with self._server.client() as client:
            client.flushall()


def home_of(kind: str, server: RedisServer) -> LogHome:
    return MemoryHome() if kind == "memory" else RedisHome(server)


def new_meta(**fields: Any) -> ReplyMeta:
    """Meta of a reply that nobody has used yet."""
    defaults = {
        "reply_id": uuid.uuid4().hex,
        "owner_hash": "",
        "model": "m",
        "fingerprint": "f",
        "format": "chat",
    }
    return ReplyMeta(**defaults | fields)


def delta(seq: int, epoch: int = 1, text: str | None = None) -> Event:
    text = f"t{seq}" if text is None else text
    return Event(seq, EventKind.DELTA, {"choice": 0, "text": text, "token_ids": [seq], "at_ms": seq}, epoch)


def deltas(first: int, last: int, epoch: int = 1) -> tuple[Event, ...]:
    return tuple(delta(seq, epoch) for seq in range(first, last + 1))


def done(seq: int, epoch: int = 1) -> Event:
    return Event(seq, EventKind.DONE, {"timings": {}, "at_ms": seq}, epoch)


def pending(reply_id: str, *events: Event, epoch: int = 1) -> PendingAppend:
    status = ReplyStatus.DONE if any(event.is_terminal for event in events) else ReplyStatus.RUNNING
    return PendingAppend(reply_id, epoch, events, status)


async def append(log: EventLog, reply_id: str, *events: Event, epoch: int = 1) -> list[AppendResult]:
    (results,) = await log.append([pending(reply_id, *events, epoch=epoch)])
    return results


async def outcomes(log: EventLog, reply_id: str, *events: Event, epoch: int = 1) -> list[AppendOutcome]:
    return [result.outcome for result in await append(log, reply_id, *events, epoch=epoch)]
