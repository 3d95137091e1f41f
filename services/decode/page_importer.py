"""Brings the pages of one transfer into its sequence's blocks: counted, verified, widened, written.

Invariant: nothing is written that did not check out, but for pages read out of another's memory, which are
checked where they were copied to; and after `stop` nobody writes to the blocks any more. The work is done off
the event loop, one page at a time, while the next one arrives.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.v1 import prefill_pb2
from services.decode.data_reader import DataReader
from services.engine.errors import InvalidKvPage
from services.engine.interface import SequenceKv
from services.engine.request import ModelIdentity
from services.kv import page
from services.kv.background import Background
from services.kv.mapped_pool import MappedPool
from services.kv.payload import PayloadFormat
from services.kv.resources import KvResources

_MOST_UNFINISHED = 4  # pages: enough that neither the wire nor the thread waits for the other


@dataclass(slots=True)
class PageCounts:
    """What has been named so far.

    Attributes:
        num_shared_pages: of these, read out of the prefill worker's memory.
        num_data_pages: of these, read off a data connection.
        num_bytes: of payload.
    """

    num_pages: int = 0
    num_shared_pages: int = 0
    num_data_pages: int = 0
    num_bytes: int = 0


class PageImporter:
    """Of one transfer.

    Args:
        form: of payloads that were asked for. EXACT ones are taken too, others are not.
        pool: out of which pages may be read.
    """

    def __init__(
        self,
        kv: SequenceKv,
        identity: ModelIdentity,
        transfer_id: str,
        form: PayloadFormat,
        resources: KvResources,
        pool: MappedPool | None = None,
    ) -> None:
        self.counts = PageCounts()
        self._kv = kv
        self._identity = identity
        self._transfer_id = transfer_id
        self._forms = (form, PayloadFormat.EXACT)
        self._traffic = resources.traffic
        self._pool = pool
        self._changed = asyncio.Event()
        self._imports = Background(resources.threads, self._changed.set)

    async def count(self, received: page.Page, data: DataReader | None) -> None:
        """Counts a page, and names it to `data` if its bytes come there.

        Raises InvalidKvPage for what cannot be a page elsewhere, before its numbers are used, and what has
        ended the reading of `data`.
        """
        header, num_bytes, counts = received.header, len(received.payload), self.counts
        if bool(num_bytes) + bool(header.blocks) + bool(header.data_bytes) > 1:
            raise InvalidKvPage("a page that is said to be in several places")
        if header.blocks:
            if self._pool is None:
                raise InvalidKvPage("a page in shared memory, which was not asked for")
            where = page.range_of(header)
            self._pool.check(where, header.blocks)
            num_bytes = page.num_bytes(self._identity, where)
            counts.num_shared_pages += 1
        elif header.data_bytes:
            if data is None:
                raise InvalidKvPage("a page on a data connection, of which there is none")
            await data.name(header)
            num_bytes = header.data_bytes
            counts.num_data_pages += 1
        counts.num_pages += 1
        counts.num_bytes += num_bytes
        self._traffic.received += num_bytes

    async def start(self, received: page.Page, on_read: Callable[[], None] | None = None) -> None:
        """Waits for its turn. Raises what an earlier page has raised.

        Args:
            on_read: called, in a thread, when nobody reads the payload any more; not if this page is refused.
        """
        await self.until_unfinished(_MOST_UNFINISHED - 1)
        self._imports.start(partial(self._import, received, on_read))

    async def until_unfinished(self, most: int = 0) -> None:
        """Waits until no more pages than that are unfinished. Raises what one has raised."""
        while self._imports.num_unfinished > most:
            self._changed.clear()
            self._imports.check()
            if self._imports.num_unfinished > most:
                await self._changed.wait()
        self._imports.check()

    async def stop(self) -> None:
        """Returns when nobody writes to the blocks any more."""
        await self._imports.stop()

    def _import(self, received: page.Page, on_read: Callable[[], None] | None) -> None:
        header = received.header
        if (form := page.format_of(header)) not in self._forms:
            raise InvalidKvPage(f"a page in {form}, {self._forms[0]} was asked for")
        if self._pool is not None and header.blocks:
            self._copy(header, self._pool)
            return
        where = page.verify(header, [received.payload], self._transfer_id, self._identity)
        self._kv.import_page(where, page.widen(received.payload, form, self._identity, where))
        if on_read is not None:
            on_read()

    def _copy(self, header: prefill_pb2.KvPage, pool: MappedPool) -> None:
        if page.format_of(header) is not PayloadFormat.EXACT:
            raise InvalidKvPage("a page in shared memory that is not exact")
        self._kv.copy_page(
            page.range_of(header),
            pool.rows,
            header.blocks,
            lambda pieces: page.verify(header, pieces, self._transfer_id, self._identity),
        )
