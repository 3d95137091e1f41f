"""Makes pages of one sequence's KV cache: cut to size, put where they travel, sealed with a checksum.

Invariant: what a checksum was taken of is what goes out; the sequence's blocks stay as they are from before
`seal` until its pieces have been sent. Called in a thread, one page at a time. Knows nothing of their order.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from baton.v1 import prefill_pb2
from services.engine.errors import InvalidKvPage
from services.engine.interface import SequenceKv
from services.engine.page_range import PageRange
from services.engine.request import ModelIdentity
from services.kv import codec, page, payload
from services.kv.data_server import DataStream
from services.kv.payload import PayloadFormat

SHARED_PAGE_BYTES = 8 * 1024 * 1024  # announcing one costs next to nothing; decode copies it in about a ms


class SealedPage(NamedTuple):
    """A page that can go.

    Attributes:
        message: an encoded PrefillMessage.
        num_bytes: of payload, wherever it is.
        pieces: of payload, which go on the data connection after the message.
    """

    message: bytes
    num_bytes: int
    pieces: Sequence[memoryview] = ()


class PageSealer:
    """Of one transfer.

    Args:
        max_page_bytes: of the cache in a page.
        form: of payloads. A page with a number that it cannot hold goes as EXACT, as do all to whoever
            reads the pool, and those of a cache that it would not make smaller.
        is_shared: the receiver reads pages out of this worker's pool: they go as names of blocks.
        data: a connection beside the messages, on which the bytes of pages go as soon as it is open.
    """

    def __init__(
        self,
        kv: SequenceKv,
        identity: ModelIdentity,
        transfer_id: str,
        max_page_bytes: int,
        form: PayloadFormat = PayloadFormat.EXACT,
        *,
        is_shared: bool = False,
        data: DataStream | None = None,
    ) -> None:
        self._kv = kv
        self._identity = identity
        self._transfer_id = transfer_id
        self._max_page_bytes = max_page_bytes
        self._form = payload.effective(form, identity.head_size, page.dtype_of(identity))
        self._is_shared = is_shared
        self._data = data

    def split(self, where: PageRange) -> Iterator[PageRange]:
        """The pages of a range."""
        return page.split(self._identity, where, self._max_page_bytes)

    def seal(self, where: PageRange) -> SealedPage:
        """Raises what the sequence raises when its blocks are no longer there."""
        if self._is_shared:
            return self._seal_shared(where)
        if self._form is not PayloadFormat.EXACT:
            with suppress(InvalidKvPage):  # for a number that it cannot hold
                return self._seal_narrow(where)
        return self._seal_exact(where)

    def _seal_shared(self, where: PageRange) -> SealedPage:
        view = self._kv.view_page(where)
        header = page.header_of(self._transfer_id, self._identity, where)
        header.blocks.extend(view.blocks)
        return _without_payload(header, view.pieces, page.num_bytes(self._identity, where))

    def _seal_narrow(self, where: PageRange) -> SealedPage:
        kv = self._kv.export_page(where)
        header = page.header_of(self._transfer_id, self._identity, where, self._form)
        num_bytes = page.num_bytes(self._identity, where, self._form)
        if self._is_on_data:
            narrowed = memoryview(bytearray(num_bytes))
            payload.narrow(kv, self._form, narrowed)
            return _beside_message(header, [narrowed], num_bytes)
        draft = codec.PageMessage(header, num_bytes)
        payload.narrow(kv, self._form, draft.payload)
        return SealedPage(draft.finish(page.checksum(header, [draft.payload])), num_bytes)

    def _seal_exact(self, where: PageRange) -> SealedPage:
        header = page.header_of(self._transfer_id, self._identity, where)
        num_bytes = page.num_bytes(self._identity, where)
        if self._is_on_data:
            return _beside_message(header, self._kv.view_page(where).pieces, num_bytes)
        draft = codec.PageMessage(header, num_bytes)
        self._kv.export_page(where, page.tensor_over(draft.payload, self._identity))
        return SealedPage(draft.finish(page.checksum(header, [draft.payload])), num_bytes)

    @property
    def _is_on_data(self) -> bool:
        return self._data is not None and self._data.is_open


def _beside_message(header: prefill_pb2.KvPage, pieces: Sequence[memoryview], num_bytes: int) -> SealedPage:
    header.data_bytes = num_bytes
    return _without_payload(header, pieces, num_bytes)._replace(pieces=pieces)


def _without_payload(header: prefill_pb2.KvPage, pieces: Sequence[memoryview], num_bytes: int) -> SealedPage:
    return SealedPage(codec.PageMessage(header, 0).finish(page.checksum(header, pieces)), num_bytes)
