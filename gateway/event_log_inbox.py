"""A gateway's inbox: one Redis stream in which owners put wake hints and peers put cancels.

Invariant: one blocking connection per process, however many readers there are; its block is shorter
than its socket timeout, it starts from an explicit ID, and a read cut short closes the connection,
never hands it back blocked. Hints carry no data and may be lost (readers poll slowly as well).
Must not know: events, owners, scripts.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import RedisError

from gateway.event_log_connection import cancellable
from gateway.signals import IdQueue, Pulse

BLOCK_MS = 1000
READER_SOCKET_TIMEOUT_S = 2.0
MAX_ENTRIES = 8192
INBOX_TTL_MS = 3_600_000  # an inbox that nobody writes to any more goes away
RETRY_S = 0.25

_log = logging.getLogger(__name__)


def inbox_key(gateway_id: str) -> str:
    return f"baton:inbox:{gateway_id}"


class Inbox:
    """Reads this gateway's inbox and writes to those of others.

    `connect_reader` gives a client of its own with one connection; `writer` may be shared.
    """

    def __init__(self, gateway_id: str, *, writer: Any, connect_reader: Callable[[], Any]) -> None:
        self.cancels = IdQueue()
        self._key = inbox_key(gateway_id)
        self._writer = writer
        self._connect_reader = connect_reader
        self._pulses: dict[str, tuple[Pulse, list[None]]] = {}
        self._hints: dict[tuple[str, str], int] = {}  # (gateway, reply) to seq
        self._hinted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._send_hints())]

    async def close(self) -> None:
        running = set(self._tasks)
        while running:  # again: a cancellation lost while redis-py connects shows only after the block
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.05)

    @contextmanager
    def listening(self, reply_id: str) -> Iterator[Pulse]:
        """A pulse that beats when a hint for the reply comes in."""
        pulse, listeners = self._pulses.setdefault(reply_id, (Pulse(), []))
        listeners.append(None)
        try:
            yield pulse
        finally:
            listeners.pop()
            if not listeners:
                self._pulses.pop(reply_id, None)

    def hint(self, gateways: Iterable[str], reply_id: str, seq: int) -> None:
        """Tells gateways, soon, that the reply has grown; hints of one reply merge."""
        for gateway in gateways:
            self._hints[gateway, reply_id] = seq
            self._hinted.set()

    async def send_cancel(self, gateway: str, reply_id: str) -> None:
        """Raises what redis-py raises."""
        await self._writer.xadd(
            inbox_key(gateway), {"cancel": reply_id}, maxlen=MAX_ENTRIES, approximate=True
        )
        await self._writer.pexpire(inbox_key(gateway), INBOX_TTL_MS)

    async def _send_hints(self) -> None:
        while True:
            await self._hinted.wait()
            self._hinted.clear()
            hints, self._hints = self._hints, {}
            pipeline = self._writer.pipeline(transaction=False)
            for (gateway, reply_id), seq in hints.items():
                entry = {"hint": reply_id, "seq": seq}
                pipeline.xadd(inbox_key(gateway), entry, maxlen=MAX_ENTRIES, approximate=True)
            for gateway in {gateway for gateway, _ in hints}:
                pipeline.pexpire(inbox_key(gateway), INBOX_TTL_MS)
            try:
                with cancellable():
                    await pipeline.execute()
            except (RedisError, OSError) as error:
                _log.debug("%d wake hints lost, readers will poll: %r", len(hints), error)

    async def _receive(self) -> None:
        """Starts from the oldest entry kept, and again after each trouble: stale ones do no harm."""
        while True:
            reader = self._connect_reader()
            try:
                await self._receive_from(reader)
            except (RedisError, OSError) as error:
                _log.debug("inbox reader reconnects: %r", error)
            finally:
                with suppress(RedisError, OSError):
                    await reader.aclose()
            await asyncio.sleep(RETRY_S)

    async def _receive_from(self, reader: Any) -> None:
        cursor = b"0-0"
        while True:
            with cancellable():
                answer = await reader.xread({self._key: cursor}, count=1000, block=BLOCK_MS)
            for _, entries in answer or ():
                for entry_id, fields in entries:
                    cursor = entry_id
                    self._dispatch(fields)

    def _dispatch(self, fields: dict[bytes, bytes]) -> None:
        if (cancelled := fields.get(b"cancel")) is not None:
            self.cancels.put(cancelled.decode(errors="replace"))
        elif (hinted := self._pulses.get(fields.get(b"hint", b"").decode(errors="replace"))) is not None:
            hinted[0].beat()
