"""The channels to prefill workers, each for as long as somebody calls through it, and a while longer.

Gateways name prefill workers whose addresses change as pods do, so channels are not kept for ever: each
dials and pings its address as long as it is open. Invariants: a channel in use is never closed; of those
not in use only so many stay open, and none for long once others are used.
Must not know: what is called, which workers there are.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from grpc import aio

from services.kv.service import PrefillClient
from services.rpc.channel import DEFAULT_PINGS, Pings, create_channel

IDLE_S = 300.0
MOST_IDLE = 64

ClientFor = Callable[[str], PrefillClient]


class _Channel:
    def __init__(self, channel: aio.Channel, target: str) -> None:
        self.channel = channel
        self.client = PrefillClient(channel, target)
        self.num_users = 0
        self.idle_since = 0.0


class PrefillChannels:
    """One channel an address.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        interceptors: Sequence[aio.ClientInterceptor],
        *,
        pings: Pings = DEFAULT_PINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interceptors = interceptors
        self._pings = pings
        self._clock = clock
        self._channels: dict[str, _Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def targets(self) -> set[str]:
        """Addresses that there is a channel to."""
        return set(self._channels)

    @contextmanager
    def borrowed(self) -> Iterator[ClientFor]:
        """Gives clients for `host:port`, whose channels stay open at least until the end of the context."""
        used: list[_Channel] = []

        def client_for(target: str) -> PrefillClient:
            if target not in self._channels:
                made = create_channel(target, self._interceptors, pings=self._pings)
                self._channels[target] = _Channel(made, target)
            channel = self._channels[target]
            channel.num_users += 1
            used.append(channel)
            return channel.client

        try:
            yield client_for
        finally:
            for channel in used:
                channel.num_users -= 1
                channel.idle_since = self._clock()
            self._close_idle()

    async def close(self) -> None:
        """Closes them all."""
        channels = [channel.channel for channel in self._channels.values()]
        self._channels.clear()
        await asyncio.gather(*(channel.close() for channel in channels), *self._closing)

    def _close_idle(self) -> None:
        """Those idle for too long, and the longest idle of too many."""
        idle = sorted(
            (target for target, channel in self._channels.items() if not channel.num_users),
            key=lambda target: self._channels[target].idle_since,
            reverse=True,
        )
        for rank, target in enumerate(idle):
            if rank >= MOST_IDLE or self._clock() - self._channels[target].idle_since >= IDLE_S:
                task = asyncio.create_task(self._channels.pop(target).channel.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
