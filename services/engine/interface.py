"""The engine as its roles see it. The real engine and the simulated one both fit it.

What does not say otherwise is called on the asyncio event loop and returns without waiting for a forward
pass; the engine computes in a thread (or on timers) of its own.

A sequence's life:

    LOCAL         submit -> events(): TextGenerated..., SequenceFinished -> release
    PREFILL_ONLY  submit -> events(): KvComputed..., FirstTokenSampled -> export_kv... -> release
    HANDOFF       submit -> reserved -> accept_first_token, import_kv... -> join (or compute_locally)
                         -> events(): TextGenerated..., SequenceFinished -> release
"""

import collections.abc
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

import torch

from services.engine.kv_rows import KvRows
from services.engine.request import (
    EngineInfo,
    EngineLoad,
    EngineRequest,
    SampledToken,
    SequenceEvent,
    SequenceTimings,
    SubmitMode,
)


class Sequence(Protocol):
    """One submitted request. Whoever submits it releases it, on every path."""

    request: EngineRequest
    timings: SequenceTimings

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

    def export_kv(
        self,
        layer_start: int,
        layer_end: int,
        token_start: int,
        token_end: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A contiguous CPU copy (layers, 2, tokens, kv_heads, head_size), keys before values.

        Only of what a KvComputed event has named, and before release. From any thread. It lies in `out`,
        (elements,) on the host, if that is given.
        """
        ...

    def look_at_kv(
        self,
        layer_start: int,
        layer_end: int,
        token_start: int,
        token_end: int,
        look: Callable[[Iterable[memoryview]], None],
    ) -> list[int]:
        """Shows the bytes that `export_kv` would copy where they are, in pieces; returns their blocks.

        Where the pool is the host's. Otherwise as `export_kv`.
        """
        ...

    def import_kv(
        self, layer_start: int, layer_end: int, token_start: int, token_end: int, payload: memoryview
    ) -> None:
        """Writes one page, laid out as `export_kv` gives it, into the reserved blocks (HANDOFF).

        From any thread.
        Raises InvalidKvPage: ranges outside the context, a size that does not fit, a repeat of a
        (layer, token) already imported; SequenceReleased after release.
        """
        ...

    def copy_kv(
        self,
        layer_start: int,
        layer_end: int,
        token_start: int,
        token_end: int,
        source: KvRows,
        source_blocks: collections.abc.Sequence[int],
        check: Callable[[Iterable[memoryview]], object],
    ) -> None:
        """Imports one page from another pool (HANDOFF). From any thread.

        Args:
            source_blocks: those that hold the page there, which the pool has.
            check: shown the page as it has been copied, in pieces; raises InvalidKvPage if it is not right.

        Raises what `check` raises, and what `import_kv` does.
        """
        ...

    @property
    def kv_complete(self) -> bool:
        """Whether every layer of every context token has been imported."""
        ...

    @property
    def num_held_tokens(self) -> int:
        """First positions that the prefix cache gave a reserved sequence: not to be imported (HANDOFF)."""
        ...

    @property
    def awaits_kv(self) -> bool:
        """Whether reserved blocks wait to be filled; never of a reply that has ended already."""
        ...

    def reset_kv(self) -> None:
        """Forgets imported pages, for a second attempt from another prefill worker."""
        ...

    def join(self) -> None:
        """Puts the sequence into the running batch. Raises InvalidKvPage unless `kv_complete`.

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
