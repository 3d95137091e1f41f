"""The workers of one role: those that the settings list, and those that DNS names stand for now.

Invariants: every address is watched once, whoever names it. A worker that no name stands for any more
gets nothing new, but is watched until it is gone, so what it still writes goes on and its address may
come back without a new connection. One process under two addresses (of a dual-stack service) is one
worker. Must not know: policies, requests.
"""

import asyncio
from collections.abc import Callable, Sequence

from gateway.routing.discovery import DnsWatch, Resolve
from gateway.routing.names import WorkerNames
from gateway.worker_watch import WorkerWatch

MakeWatch = Callable[[str, Callable[[], None]], WorkerWatch]


class WorkerPool:
    """Watches workers from `start` to `close`.

    Args:
        make_watch: for an address; the second argument is to be called when the worker comes, goes or drains.
        on_change: called then, and when there are other workers than before.
    """

    def __init__(
        self,
        names: WorkerNames,
        make_watch: MakeWatch,
        *,
        resolve: Resolve,
        discovery_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._listed = names.addresses
        self._dns = [
            DnsWatch(name, resolve=resolve, interval_s=discovery_s, on_change=self._renamed)
            for name in names.dns_names
        ]
        self._make_watch = make_watch
        self._on_change = on_change
        self._named: dict[str, WorkerWatch] = {}
        self._retired: dict[str, WorkerWatch] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to watch; what DNS names stand for comes when it has been looked up."""
        self._name(self._listed)
        for name in self._dns:
            name.start()

    async def close(self) -> None:
        await asyncio.gather(*(name.close() for name in self._dns))
        watches = (*self._named.values(), *self._retired.values())
        await asyncio.gather(*(watch.close() for watch in watches), *self._closing)

    @property
    def workers(self) -> list[WorkerWatch]:
        """Those that may get requests if they are up, each process once, the listed ones first."""
        workers: dict[str, WorkerWatch] = {}
        for watch in list(self._named.values()):
            workers.setdefault(watch.instance or watch.address, watch)
        return list(workers.values())

    @property
    def num_retired(self) -> int:
        """Workers that no name stands for any more, and that are still up."""
        return len(self._retired)

    @property
    def num_listed(self) -> int:
        """Workers that the settings list, each process once as far as it was ever seen."""
        return len({watch.process for watch in self._named.values() if watch.address in self._listed})

    @property
    def num_discovered(self) -> int:
        """Workers that only a DNS name stands for."""
        return len({watch.process for watch in self._named.values()}) - self.num_listed

    @property
    def num_unresolved(self) -> int:
        """DNS names that stand for nobody yet."""
        return sum(not name.addresses for name in self._dns)

    def find(self, address: str) -> WorkerWatch | None:
        return self._named.get(address) or self._retired.get(address)

    def _renamed(self) -> None:
        self._name((*self._listed, *(address for name in self._dns for address in name.addresses)))
        self._on_change()

    def _name(self, addresses: Sequence[str]) -> None:
        """Makes these the workers: new ones are watched, others retired."""
        before = self._named
        self._named = {address: self._adopt(address) for address in dict.fromkeys(addresses)}
        self._retired |= {a: watch for a, watch in before.items() if a not in self._named}
        self._drop_the_gone()

    def _adopt(self, address: str) -> WorkerWatch:
        watch = self._named.get(address) or self._retired.pop(address, None)
        if watch is None:
            watch = self._make_watch(address, self._changed)
            watch.start()
        return watch

    def _changed(self) -> None:
        self._drop_the_gone()
        self._on_change()

    def _drop_the_gone(self) -> None:
        """Not at once: a watch that has just seen its worker go has yet to tell the worker's calls."""
        for address, watch in list(self._retired.items()):
            if not watch.is_up:
                del self._retired[address]
                task = asyncio.create_task(watch.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
