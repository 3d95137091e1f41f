"""What happens to a sequence, on its way to whoever waits for it on the event loop.

Invariant: an error ends the iteration after what was posted before it, and frees who waits for blocks.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from services.engine.errors import EngineError
from services.engine.request import FirstTokenSampled, SequenceEvent, SequenceFinished


class SequenceEvents:
    """A queue with an end, and one moment of its own: blocks are reserved."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[SequenceEvent | EngineError] = asyncio.Queue()
        self._reserved = asyncio.Event()
        self._failure: EngineError | None = None

    async def iterate(self) -> AsyncIterator[SequenceEvent]:
        """See `interface.Sequence.events`."""
        while True:
            event = await self._queue.get()
            if isinstance(event, EngineError):
                raise event
            yield event
            if isinstance(event, SequenceFinished | FirstTokenSampled):
                return

    async def reserved(self) -> None:
        """See `interface.Sequence.reserved`."""
        await self._reserved.wait()
        if self._failure is not None:
            raise self._failure

    def announce_reserved(self) -> None:
        self._reserved.set()

    def post(self, events: Iterable[SequenceEvent]) -> None:
        for event in events:
            self._queue.put_nowait(event)

    def fail(self, error: EngineError) -> None:
        self._failure = error
        self._queue.put_nowait(error)
        self._reserved.set()
