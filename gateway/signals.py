"""Two small asyncio signals that the logs and the hub share.

Invariant: nothing here queues more than one entry per reply. Must not know: replies' contents.
"""

import asyncio


class Pulse:
    """Wakes everybody who waits now; whoever asks later waits for the next beat.

    Take `next()` before looking at the state it announces, then wait on it: no beat is missed.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        return self._event

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class IdQueue:
    """A queue of distinct IDs: putting one that already waits changes nothing."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._filled = asyncio.Event()

    def put(self, reply_id: str) -> None:
        self._ids[reply_id] = None
        self._filled.set()

    async def get(self) -> str:
        while not self._ids:
            self._filled.clear()
            await self._filled.wait()
        reply_id = next(iter(self._ids))
        del self._ids[reply_id]
        return reply_id
