"""The keys and values of one sequence, as pages that leave its blocks or come into them.

The methods are `interface.SequenceKv`, called from any thread. What moves bytes holds the engine's lock,
so that nobody writes to blocks that are being let go; what only reads them afterwards does not.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from services.engine.errors import EngineStopped, InvalidKvPage, SequenceReleased
from services.engine.interface import PageView
from services.engine.kv_coverage import KvCoverage
from services.engine.kv_rows import KvRows
from services.engine.page_range import PageRange
from services.engine.sequence_host import SequenceHost
from services.engine.sequence_state import SequenceState

if TYPE_CHECKING:
    from services.engine.sequence import EngineSequence


class EngineSequenceKv:
    """See `interface.SequenceKv`."""

    def __init__(self, sequence: "EngineSequence", host: SequenceHost) -> None:
        self._sequence = sequence
        self._host = host
        self._coverage = KvCoverage(host.cache.layout.num_layers, sequence.request.num_context_tokens)

    @property
    def is_complete(self) -> bool:
        return self._coverage.is_complete

    def export_page(self, where: PageRange, out: torch.Tensor | None = None) -> torch.Tensor:
        with self._host.lock():
            self._check_exportable()
            return self._host.cache.export_range(self._sequence.block_table, where, out)

    def view_page(self, where: PageRange) -> PageView:
        cache = self._host.cache
        with self._host.lock():
            self._check_exportable()
            table = self._sequence.block_table
            blocks = table[where.token_start // cache.block_size : -(-where.token_end // cache.block_size)]
            if not cache.is_on_host:
                page = cache.export_range(table, where)
                return PageView([page.view(-1).view(torch.uint8).numpy().data], blocks)
            runs = cache.runs(table, where)
        # Read without the lock, which a step may want: once the blocks are let go, nobody asks what was seen.
        return PageView(list(cache.rows.pieces(where, runs)), blocks)

    def import_page(self, where: PageRange, payload: memoryview) -> None:
        cache = self._host.cache
        self._coverage.check(where)
        page = cache.read_page(where, payload)
        with self._host.lock():
            self._check_importable()
            if self._has_blocks():
                cache.import_range(self._sequence.block_table, where, page)
            self._coverage.add(where)

    def copy_page(
        self,
        where: PageRange,
        source: KvRows,
        source_blocks: Sequence[int],
        check: Callable[[Iterable[memoryview]], object],
    ) -> None:
        rows = self._host.cache.rows
        self._coverage.check(where)
        source_runs = source.runs(source_blocks, where.token_start, where.token_end)
        with self._host.lock():
            self._check_importable()
            runs = []
            if self._has_blocks():
                runs = self._host.cache.runs(self._sequence.block_table, where)
                rows.copy_from(source, where, source_runs, runs)
        # Without the lock, which a step may want. A first token that ends the reply meanwhile frees the
        # blocks: what they hold by then says nothing of the page.
        try:
            if runs:
                check(rows.pieces(where, runs))
                rows.check_numbers(where, runs)
        except InvalidKvPage:
            with self._host.lock():
                if self._has_blocks():
                    raise
        with self._host.lock():
            self._check_importable()
            self._coverage.add(where)

    def reset(self) -> None:
        with self._host.lock():
            self._coverage.reset()

    def hold(self, num_tokens: int) -> None:
        """The first positions are in the block table already and need no import. With the lock held."""
        self._coverage.hold(num_tokens)

    def _has_blocks(self) -> bool:
        """Not after a first token that ended the reply: its pages lead nowhere."""
        return self._sequence.state is SequenceState.RESERVED

    def _check_importable(self) -> None:
        if self._sequence.state not in (SequenceState.RESERVED, SequenceState.ENDED):
            raise SequenceReleased(self._sequence.request.request_id)

    def _check_exportable(self) -> None:
        sequence = self._sequence
        if sequence.state is SequenceState.RELEASED:
            raise SequenceReleased(sequence.request.request_id)
        if not sequence.block_table:
            raise sequence.failure or EngineStopped("the sequence's step has failed")
