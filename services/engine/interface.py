"""The engine as its roles see it. The real engine and the simulated one both fit it.

What does not say otherwise is called on the asyncio event loop and returns without waiting for a forward
pass; the engine computes in a thread (or on timers) of its own.

A sequence's life:

    LOCAL         submit -> events(): TextGenerated..., SequenceFinished -> release
    PREFILL_ONLY  submit -> events(): KvComputed..., FirstTokenSampled -> kv.export_page... -> release
    HANDOFF       submit -> reserved -> accept_first_token, kv.import_page... -> join (or compute_locally)
                         -> events(): TextGenerated..., SequenceFinished -> release
"""

import collections.abc
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from services.engine.kv_rows import KvRows
from services.engine.page_range import PageRange
from services.engine.request import (
    EngineInfo,
    EngineLoad,
    EngineRequest,
    SampledToken,
    SequenceEvent,
    SequenceTimings,
    SubmitMode,
)


class PageView(NamedTuple):
    """The bytes of a page in order, (layers, 2, tokens, kv_heads, head_size), keys before values.

    Attributes:
        pieces: where they are, if the pool is the host's; else a copy.
        blocks: those that the page lies in.
    """

    pieces: list[memoryview]
    blocks: list[int]


class SequenceKv(Protocol):
    """The KV cache of one sequence, page by page. Every method may be called from any thread."""

    def export_page(self, where: PageRange, out: torch.Tensor | None = None) -> torch.Tensor:
        """A contiguous CPU copy (layers, 2, tokens, kv_heads, head_size), keys before values.

        Only of what a KvComputed event has named, and before release. It lies in `out`, (elements,) on the
        host, if that is given. Raises SequenceReleased, or what took the blocks away.
        """
        ...

    def view_page(self, where: PageRange) -> PageView:
        """What `export_page` would copy, where it lies. It changes once the sequence has been released."""
        ...

    def import_page(self, where: PageRange, payload: memoryview) -> None:
        """Writes one page, laid out as `export_page` gives it, into the reserved blocks (HANDOFF).

        Raises InvalidKvPage: ranges outside the context, a size that does not fit, a repeat of a
        (layer, token) already imported; SequenceReleased after release.
        """
        ...

    def copy_page(
        self,
        where: PageRange,
        source: KvRows,
        source_blocks: collections.abc.Sequence[int],
        check: Callable[[Iterable[memoryview]], object],
    ) -> None:
        """Imports one page from another pool (HANDOFF).

        Args:
            source_blocks: those that hold the page there, which the pool has.
            check: shown the page as it has been copied, in pieces; raises InvalidKvPage if it is not right.

        Raises what `check` raises, and what `import_page` does.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether every layer of every context token has been imported."""
        ...

    def reset(self) -> None:
        """Forgets imported pages, for a second attempt from another prefill worker."""
        ...


class Sequence(Protocol):
    """One submitted request. Whoever submits it releases it, on every path."""

    request: EngineRequest
    timings: SequenceTimings

    @property
    def kv(self) -> SequenceKv:
        """Its keys and values."""
        ...

    def events(self) -> AsyncIterator[SequenceEvent]:
        """What happens to the sequence, in order; iterate once.

        Ends after SequenceFinished, or after FirstTokenSampled for PREFILL_ONLY. Raises
        SequenceReleased if released meanwhile, EngineStopped if the engine fails or closes.
        """
        ...

    async def reserved(self) -> None:
        """Waits until blocks for the context and one more are held (HANDOFF).

        Raises SequenceReleased or EngineStopped.
        """
        ...

    def accept_first_token(self, token: SampledToken) -> None:
        """Takes the prefill worker's token as the next generated one and emits its text (HANDOFF).

        Before `join`; at most once. If the token ends the reply (end-of-sequence, max_tokens
        reached) SequenceFinished follows and no join is needed. Raises InvalidKvPage for a token
        outside the vocabulary.
        """
        ...

    @property
    def num_held_tokens(self) -> int:
        """First positions that the prefix cache gave a reserved sequence: not to be imported (HANDOFF)."""
        ...

    @property
    def awaits_kv(self) -> bool:
        """Whether reserved blocks wait to be filled; never of a reply that has ended already."""
        ...

    def join(self) -> None:
        """Puts the sequence into the running batch. Raises InvalidKvPage unless `kv.is_complete`.

        The first token must have been accepted.
        """
        ...

    def compute_locally(self) -> None:
        """Runs the context on this engine instead of importing it; an accepted first token stands."""
        ...

    def release(self) -> None:
        """Stops compute within one step and frees the blocks. Idempotent, from any state."""
        ...


class Engine(Protocol):
    """A model with its KV pool and its batch."""

    info: EngineInfo

    async def start(self) -> None:
        """Starts computing; returns when requests can be submitted."""
        ...

    async def close(self) -> None:
        """Stops; live sequences raise EngineStopped."""
        ...

    async def failed(self) -> None:
        """Returns when the engine can compute no more, which nobody asked for; the process should end."""
        ...

    def submit(self, request: EngineRequest, mode: SubmitMode) -> Sequence:
        """Admits a sequence, queued included.

        Raises InvalidRequest (PromptTooLong if it could never fit), QueueFull, EngineStopped.
        """
        ...

    def load(self) -> EngineLoad:
        """A snapshot for the router and for status."""
        ...
