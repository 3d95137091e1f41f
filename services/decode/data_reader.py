"""Reads the pages of one transfer off its data connection, in the order in which messages name them.

In a task of its own, so that a first token does not wait behind the bytes of a page.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.kv.data_connection import DataConnection
from services.kv.resources import Staging

_MOST_NAMED = (
    64  # pages whose bytes are still to come, before messages wait for them: buffers hold small ones
)

OnPage = Callable[[prefill_pb2.KvPage, memoryview, Callable[[], None]], Awaitable[None]]


class DataReader:
    """Of one transfer.

    Args:
        connect: opens its connection.
        most_bytes: of a page.
        on_page: given header and payload, and what to call when nobody reads the payload any more.
        on_failure: called when pages that were named will not come, and `lost` says why.

    Attributes:
        failure: what has ended the reading. As long as no page is named, it harms nobody.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[DataConnection]],
        staging: Staging,
        most_bytes: int,
        on_page: OnPage,
        on_failure: Callable[[], None],
    ) -> None:
        self.failure: BaseException | None = None
        self._staging = staging
        self._most_bytes = most_bytes
        self._on_page = on_page
        self._on_failure = on_failure
        self._named: asyncio.Queue[prefill_pb2.KvPage] = asyncio.Queue(_MOST_NAMED)
        self._num_left = 0  # pages that were named and have not been given to on_page
        self._reading = asyncio.create_task(self._read(connect))
        self._reading.add_done_callback(self._end)

    @property
    def lost(self) -> BaseException | None:
        """What has kept pages that were named from coming."""
        return self.failure if self._num_left else None

    async def name(self, header: prefill_pb2.KvPage) -> None:
        """Its bytes are on their way. Waits while those of many others are, too.

        Raises InvalidKvPage for what nobody would send, and what has ended the reading.
        """
        if self.failure is not None:
            raise self.failure
        if header.data_bytes > self._most_bytes:
            raise InvalidKvPage(f"a page of {header.data_bytes} bytes, {self._most_bytes} were asked for")
        self._num_left += 1
        await self._named.put(header)

    async def drained(self) -> None:
        """Waits until every page that was named has been given to `on_page`."""
        await self._named.join()

    async def close(self) -> None:
        """No byte is read any more. Idempotent."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, connect: Callable[[], Awaitable[DataConnection]]) -> None:
        connection = await connect()
        try:
            while True:
                header = await self._named.get()
                buffer = self._staging.take(self._most_bytes)
                payload = memoryview(buffer)[: header.data_bytes]
                await connection.receive(payload)
                await self._on_page(header, payload, partial(self._staging.give_back, buffer))
                self._num_left -= 1
                self._named.task_done()
        finally:
            connection.close()

    def _end(self, reading: "asyncio.Task[None]") -> None:
        if not reading.cancelled() and (error := reading.exception()) is not None:
            self.failure = error
            if self.lost:
                self._on_failure()
