"""Receives one sequence's KV cache: one Prefill call, verified page by page into reserved blocks.

Invariant: `pull` returns only when every layer of every context token has arrived, checked out and
been imported; anything else raises, and the caller decides who is asked next. Either way nobody writes
to the sequence's blocks any more. The first token is passed on the moment it arrives, ahead of the pages;
a page is verified and copied off the event loop, while the next one arrives.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from grpc import aio

from baton.v1 import prefill_pb2
from services.decode.data_reader import DataReader
from services.decode.page_importer import PageCounts, PageImporter
from services.engine.errors import InvalidKvPage
from services.engine.interface import Sequence
from services.engine.request import ModelIdentity
from services.kv import codec, page
from services.kv.data_connection import DataConnection
from services.kv.payload import PayloadFormat
from services.kv.resources import KvResources
from services.kv.service import PrefillClient
from services.rpc.channel import DEFAULT_PINGS, Pings
from services.rpc.status import DataConnectionLost, reason_of
from services.wire import payload_format_to_proto

log = structlog.get_logger()

_END_S = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one completed pull moved, and how long it took beyond the first token."""

    pages: PageCounts
    after_first_token_s: float  # first token in hand to last page verified


class KvReceiver:
    """One attempt at one prefill worker.

    Args:
        form: that payloads should have on the wire; shared memory holds the cache itself.
        pings: when a data connection that says nothing counts as broken.
    """

    def __init__(
        self,
        client: PrefillClient,
        sequence: Sequence,
        identity: ModelIdentity,
        resources: KvResources,
        on_first_token: Callable[[prefill_pb2.FirstToken], None],
        form: PayloadFormat = PayloadFormat.EXACT,
        pings: Pings = DEFAULT_PINGS,
    ) -> None:
        self._client = client
        self._sequence = sequence
        self._identity = identity
        self._resources = resources
        self._on_first_token = on_first_token
        self._form = form
        self._pings = pings
        self._transfer_id = secrets.token_hex(16)
        self._pool = client.shortcuts.pool
        self._pages = PageImporter(sequence.kv, identity, self._transfer_id, form, resources, self._pool)
        self._data: DataReader | None = None
        self._first_token_at: float | None = None
        self._imported_at = 0.0

    async def pull(self, request: prefill_pb2.PrefillRequest, timeout_s: float | None) -> Transfer:
        """Runs the call to its end; once.

        Raises InvalidKvPage (damaged, missing or surplus pages), AioRpcError (the worker's status) or
        DataConnectionLost.
        """
        request.transfer_id = self._transfer_id
        request.payload_format = payload_format_to_proto(self._form)
        if self._pool is not None:
            request.shared_pool = self._pool.pool_id
        call = self._client.prefill(request, timeout=timeout_s)
        result: prefill_pb2.PrefillResult | None = None
        try:
            async with asyncio.timeout(None) as bound:
                if self._pool is None:
                    self._open_data(request.max_page_bytes, bound)
                async for data in call:
                    if result is not None:
                        raise InvalidKvPage("a message after the result")
                    message = codec.decode_message(data)
                    if isinstance(message, page.Page):
                        await self._take_page(message)
                        continue
                    match message.WhichOneof("message"):
                        case "first_token":
                            self._take_first_token(message.first_token)
                        case "result":
                            result = message.result
                            await self._until_imported()
                            # All is here: whoever does not end the call is not waited for.
                            bound.reschedule(asyncio.get_running_loop().time() + _END_S)
                            if self._pages.counts.num_shared_pages:
                                await self._client.release(self._transfer_id)
                        case unknown:
                            raise InvalidKvPage(f"unknown prefill message {unknown!r}")
        except TimeoutError:
            if self._data is not None and (lost := self._data.lost) is not None:
                raise lost from None  # also after the result: bytes may still have been on their way
            log.warning("prefill did not end a call whose result it has sent", transfer=self._transfer_id)
        except aio.AioRpcError as error:
            if reason_of(error) == DataConnectionLost.__name__:
                raise DataConnectionLost(f"prefill says: {error.details()}") from error
            raise
        finally:
            call.cancel()  # leaving the loop early cancels nothing by itself
            await self._stop()
        return self._finish(result)

    def _open_data(self, most_bytes: int, bound: asyncio.Timeout) -> None:
        if (address := self._client.shortcuts.data_address) is None:
            return

        def end_pull() -> None:
            with suppress(RuntimeError):  # it has ended by itself
                bound.reschedule(asyncio.get_running_loop().time())

        self._data = DataReader(
            partial(DataConnection.open, *address, self._transfer_id, self._pings),
            self._resources.staging,
            max(most_bytes, page.bytes_per_token_layer(self._identity)),
            self._take_data_page,
            end_pull,
        )

    async def _stop(self) -> None:
        """Nobody writes to the sequence's blocks from then on."""
        if self._data is not None:
            await self._data.close()
            if isinstance(self._data.failure, DataConnectionLost):
                self._client.shortcuts.leave_data()
        await self._pages.stop()
        counts = self._pages.counts
        if self._pool is not None and counts.num_pages and not counts.num_shared_pages:
            self._client.shortcuts.forget()  # another process answers at this address

    async def _take_page(self, received: page.Page) -> None:
        await self._pages.count(received, self._data)
        if not received.header.data_bytes:  # else it is started when its bytes have come
            await self._pages.start(received)

    async def _take_data_page(
        self, header: prefill_pb2.KvPage, payload: memoryview, on_read: Callable[[], None]
    ) -> None:
        await self._pages.start(page.Page(header, payload), on_read)

    async def _until_imported(self) -> None:
        """Waits until all that was named has been written to blocks. Raises what an import has raised."""
        if self._data is not None:
            await self._data.drained()
        await self._pages.until_unfinished()
        self._imported_at = time.monotonic()

    def _take_first_token(self, message: prefill_pb2.FirstToken) -> None:
        if self._first_token_at is not None:
            raise InvalidKvPage("two first tokens in one transfer")
        self._first_token_at = time.monotonic()
        self._on_first_token(message)

    def _finish(self, result: prefill_pb2.PrefillResult | None) -> Transfer:
        if result is None:
            raise InvalidKvPage("the transfer ended without a result")
        if self._first_token_at is None:
            raise InvalidKvPage("the transfer ended without a first token")
        counts = self._pages.counts
        if (result.num_pages, result.num_bytes) != (counts.num_pages, counts.num_bytes):
            raise InvalidKvPage(
                f"{counts.num_pages} pages of {counts.num_bytes} bytes arrived, not the {result.num_pages} "
                f"of {result.num_bytes} that were sent"
            )
        if not self._sequence.kv.is_complete:
            raise InvalidKvPage("parts of the KV cache are missing")
        after_s = max(0.0, self._imported_at - self._first_token_at)
        return Transfer(counts, after_s)
