"""Follows one DNS name: which addresses it has now, asked again every few seconds.

Made for headless services of Kubernetes, whose A and AAAA records come and go with the pods.

Invariants: a lookup that fails, or finds nothing, changes nothing: the last known addresses stay, and
the log says so once until it works again. At most one lookup of a name is under way, however long it
hangs, so it can stall neither the loop nor, round by round, the threads that lookups run in.
Must not know: workers, what is done with the addresses.

By `loop.getaddrinfo`: it runs in a thread and goes by the pod's own resolv.conf and hosts file, like
everything else in the pod. aiodns would add TTLs and SRV records at the price of a compiled resolver
with rules of its own; a headless service's TTL is its zone's, 5 to 30 s, and its port is known. Not left
to gRPC, whose own resolver would hide the workers behind one channel that has no load to compare.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from gateway.routing.names import DnsName

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

_EAGER_S = 1.0  # between lookups as long as nothing is known at all

_log = logging.getLogger(__name__)


async def resolve(name: str, port: int) -> list[str]:
    """The addresses of a name, as `host:port` and `[host]:port`. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [
        f"[{sockaddr[0]}]:{port}" if family == socket.AF_INET6 else f"{sockaddr[0]}:{port}"
        for family, _, _, _, sockaddr in found
    ]


class DnsWatch:
    """One name's addresses, from `start` to `close`.

    Args:
        interval_s: from one lookup to the next; also how long one may take before it counts as failed.
        on_change: called when there are other addresses than before.
    """

    def __init__(
        self, name: DnsName, *, resolve: Resolve, interval_s: float, on_change: Callable[[], None]
    ) -> None:
        self.name = name
        self.addresses: tuple[str, ...] = ()  # distinct, sorted
        self._resolve = resolve
        self._interval_s = interval_s
        self._on_change = on_change
        self._lookup: asyncio.Task[Sequence[str]] | None = None
        self._has_failed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        tasks = [task for task in (self._task, self._lookup) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def refresh(self) -> None:
        """One round: a lookup, or more patience with the one that hangs."""
        if self._lookup is None:
            self._lookup = asyncio.create_task(self._look_up())
        done, _ = await asyncio.wait({self._lookup}, timeout=self._interval_s)
        if not done:
            self._failed(f"no answer in {self._interval_s:g} s")
            return
        lookup, self._lookup = self._lookup, None
        try:
            addresses = tuple(sorted(set(lookup.result())))
        except (OSError, UnicodeError) as error:
            self._failed(str(error))
            return
        if addresses:
            self._found(addresses)
        else:
            self._failed("no addresses")

    async def _look_up(self) -> Sequence[str]:
        return await self._resolve(self.name.name, self.name.port)

    async def _watch(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:  # noqa: BLE001  # a name that nobody follows would keep its addresses for ever
                _log.exception("following %s failed", self.name)
            await asyncio.sleep(self._interval_s if self.addresses else min(self._interval_s, _EAGER_S))

    def _found(self, addresses: tuple[str, ...]) -> None:
        if self._has_failed:
            _log.info("%s resolves again", self.name)
        self._has_failed = False
        if addresses != self.addresses:
            _log.info("%s now stands for %s", self.name, ", ".join(addresses))
            self.addresses = addresses
            self._on_change()

    def _failed(self, reason: str) -> None:
        if not self._has_failed:
            kept = f"the {len(self.addresses)} known addresses stay" if self.addresses else "none are known"
            _log.warning("%s cannot be looked up: %s; %s", self.name, reason, kept)
        self._has_failed = True
