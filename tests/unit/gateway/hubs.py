"""Hubs of several gateways over one store, and a log that can be held up or cut off."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Self

from gateway.event_log import AppendResult, EventLog, LogUnavailable, PendingAppend, ReplyMeta
from gateway.events import Event, EventKind
from gateway.owned_reply import OwnedReply
from gateway.replies import ReplyHub
from tests.unit.gateway.event_logs import LogHome, new_meta


class ManualClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SteeredLog:
    """An event log behind a switch (`down`) and gates: calls wait while theirs is shut.

    `gate`: before an append; `answers`: after it; `detaching`: before a detach.
    `refusing`: answers, but takes no writes, like a Redis that is full.
    """

    def __init__(self, log: EventLog) -> None:
        self.down = False
        self.refusing = False
        self.gate, self.answers, self.detaching = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.gate, self.answers, self.detaching):
            gate.set()
        self.num_waiting = 0
        self.num_asked = 0  # calls that neither append, detach nor follow
        self.num_refused = 0
        self.batches: list[Sequence[PendingAppend]] = []
        self._log = log

    async def healthy(self) -> bool:
        return not self.down

    async def append(self, batch: Sequence[PendingAppend]) -> list[list[AppendResult]]:
        self.batches.append(batch)
        self.num_waiting += 1
        await self.gate.wait()
        self.num_waiting -= 1
        if self.down or self.refusing:
            raise LogUnavailable("told to refuse")
        results = await self._log.append(batch)
        await self.answers.wait()
        return results

    async def detach(self, reply_id: str) -> None:
        await self.detaching.wait()
        if self.down:
            raise LogUnavailable("told to be down")
        await self._log.detach(reply_id)

    async def follow(self, reply_id: str, after: int) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self._log.follow(reply_id, after)) as pages:
            while True:
                if self.down:
                    raise LogUnavailable("told to be down")
                try:
                    yield await anext(pages)
                except StopAsyncIteration:
                    return

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._log, name)
        if not inspect.iscoroutinefunction(member):
            return member

        async def call(*args: Any) -> Any:
            self.num_asked += 1
            if self.down:
                self.num_refused += 1
                raise LogUnavailable("told to be down")
            return await member(*args)

        return call


class Hubs:
    """Opens hubs on one store; leaving the context closes those still open."""

    def __init__(self, home: LogHome) -> None:
        self._home = home
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def open(self, gateway_id: str = "g1", *, lease_s: float = 3.0, **settings: Any) -> ReplyHub:
        """A started hub; its log is a `SteeredLog`, see `steered`."""
        log: Any = SteeredLog(await self._home.open(gateway_id, lease_s=lease_s))
        hub = ReplyHub(log, gateway_id=gateway_id, lease_s=lease_s, **{"resume_grace_s": 30.0} | settings)
        await hub.start()
        self._stack.push_async_callback(hub.close)
        return hub

    def lose_data(self) -> None:
        self._home.lose_data()


def steered(hub: ReplyHub) -> SteeredLog:
    log: Any = hub.log
    assert isinstance(log, SteeredLog)
    return log


async def opened(hub: ReplyHub, **meta: Any) -> OwnedReply:
    return await hub.open(new_meta(**meta), arrived=0.0)


def say(reply: OwnedReply, *texts: str) -> None:
    for text in texts:
        reply.emit(EventKind.DELTA, {"choice": 0, "text": text, "token_ids": [1], "at_ms": 1})


def finish(reply: OwnedReply) -> None:
    reply.emit(EventKind.DONE, {"timings": {}, "at_ms": 1})


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.payload.get("text", "") for event in events)


async def read_all(
    hub: ReplyHub, reply_id: str, after: int = 0, after_epoch: int | None = None
) -> list[Event]:
    async with aclosing(hub.read(reply_id, after, after_epoch)) as pages:
        return [event async for page in pages for event in page]


async def logged(hub: ReplyHub, meta: ReplyMeta) -> list[Event]:
    """What the store holds of a reply."""
    return await hub.log.read(meta.reply_id, 0)
