"""The event log of a gateway that runs without Redis: same rules, gone with the process.

Invariant: every method decides and writes without awaiting in between, so that each is atomic on
the event loop, as each script is in Redis. Several logs may share one `MemoryStore`, each as a
gateway of its own; that is how the contract is tested. Must not know: formats, HTTP, the network.
"""

import heapq
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from gateway.event_log import (
    SCHEMA_VERSION,
    TOMBSTONE_S,
    AppendOutcome,
    AppendResult,
    PendingAppend,
    ReplyExists,
    ReplyGone,
    ReplyMeta,
    ReplyState,
    ReplyUnknown,
    check_reply_id,
    continuing,
)
from gateway.events import Event, ReplyStatus
from gateway.signals import IdQueue, Pulse


@dataclass(slots=True)
class _Entry:
    """One reply as the store holds it."""

    meta: ReplyMeta
    epoch: int
    owner_gateway: str
    lease_token: str
    expires_at: float
    status: ReplyStatus = ReplyStatus.QUEUED
    cancel_requested: bool = False
    events: list[Event] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)  # gateway to expiry
    grown: Pulse = field(default_factory=Pulse)

    @property
    def terminal_seq(self) -> int | None:
        return self.events[-1].seq if self.events and self.events[-1].is_terminal else None


class MemoryStore:
    """What a Redis server would hold. Expiry needs no timer: each access drops what is due."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.entries: dict[str, _Entry] = {}
        self.tombstones: dict[str, float] = {}  # reply ID to expiry
        self.cancels: dict[str, IdQueue] = {}  # gateway ID to its cancel requests
        self._due: list[tuple[float, str]] = []  # one heap entry per reply or tombstone

    def add(self, reply_id: str, entry: _Entry) -> None:
        self.entries[reply_id] = entry
        heapq.heappush(self._due, (entry.expires_at, reply_id))

    def bury(self, reply_id: str, expires_at: float) -> None:
        """Notes that the reply has ended, so that its absence will mean gone, not unknown."""
        self.tombstones[reply_id] = expires_at
        heapq.heappush(self._due, (self.entries[reply_id].expires_at, reply_id))

    def find(self, reply_id: str) -> _Entry | None:
        self.purge()
        return self.entries.get(reply_id)

    def get(self, reply_id: str) -> _Entry:
        check_reply_id(reply_id)
        entry = self.find(reply_id)
        if entry is not None:
            return entry
        raise ReplyGone(reply_id) if reply_id in self.tombstones else ReplyUnknown(reply_id)

    def purge(self) -> None:
        """Drops replies and tombstones whose time is over; amortised constant."""
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            _, reply_id = heapq.heappop(self._due)
            entry = self.entries.get(reply_id)
            if entry is not None and entry.expires_at <= now:
                del self.entries[reply_id]
                entry.grown.beat()
                entry = None
            expires_at = entry.expires_at if entry is not None else self.tombstones.get(reply_id)
            if expires_at is None:
                continue
            if expires_at > now:
                heapq.heappush(self._due, (expires_at, reply_id))
            else:
                del self.tombstones[reply_id]


class MemoryEventLog:
    """`EventLog` over a `MemoryStore`."""

    def __init__(
        self,
        gateway_id: str,
        *,
        lease_s: float = 3.0,
        reply_ttl_s: float = 600.0,
        safety_ttl_s: float = 3600.0,
        store: MemoryStore | None = None,
    ) -> None:
        self._gateway_id = gateway_id
        self._mark_s = 2 * lease_s
        self._reply_ttl_s = reply_ttl_s
        self._safety_ttl_s = safety_ttl_s
        self._store = store if store is not None else MemoryStore()
        self._cancels = self._store.cancels.setdefault(gateway_id, IdQueue())

    async def start(self) -> None:
        """Nothing to connect."""

    async def close(self) -> None:
        """Nothing to disconnect."""

    @property
    def is_durable(self) -> bool:
        return False

    async def healthy(self) -> bool:
        return True

    async def create(self, meta: ReplyMeta) -> int:
        check_reply_id(meta.reply_id)
        if self._store.find(meta.reply_id) is not None or meta.reply_id in self._store.tombstones:
            raise ReplyExists(meta.reply_id)
        self._store.add(meta.reply_id, self._new_entry(meta, 1))
        return 1

    async def restore(self, meta: ReplyMeta, epoch: int) -> bool:
        check_reply_id(meta.reply_id)
        entry = self._store.find(meta.reply_id)
        if entry is not None:
            return entry.epoch <= epoch
        if meta.reply_id in self._store.tombstones:
            return False
        self._store.add(meta.reply_id, self._new_entry(meta, epoch))
        return True

    async def append(self, batch: Sequence[PendingAppend]) -> list[list[AppendResult]]:
        for pending in batch:
            check_reply_id(pending.reply_id)
        self._store.purge()
        return [self._append(pending) for pending in batch]

    async def read(self, reply_id: str, after: int, limit: int = 512) -> list[Event]:
        after = max(after, 0)
        return self._store.get(reply_id).events[after : after + limit]

    async def follow(self, reply_id: str, after: int) -> AsyncGenerator[list[Event], None]:
        last: Event | None = None
        while True:
            entry = self._store.get(reply_id)
            grown = entry.grown.next()
            start = last.seq - 1 if last else max(after, 0)
            page = continuing(last, entry.events[start : start + 512])
            if page:
                last = page[-1]
                yield page
            elif entry.terminal_seq is not None:
                return
            else:
                await grown.wait()

    async def meta(self, reply_id: str) -> ReplyMeta:
        return self._store.get(reply_id).meta

    async def state(self, reply_id: str) -> ReplyState:
        entry = self._store.get(reply_id)
        return ReplyState(
            status=entry.status,
            epoch=entry.epoch,
            last_seq=len(entry.events),
            terminal_seq=entry.terminal_seq,
            cancel_requested=entry.cancel_requested,
            owner_gateway=entry.owner_gateway,
            lease_token=entry.lease_token,
        )

    async def claim(self, reply_id: str, lease_token: str) -> int | None:
        entry = self._store.get(reply_id)
        if (
            entry.lease_token != lease_token
            or entry.terminal_seq is not None
            or entry.meta.schema > SCHEMA_VERSION
        ):
            return None
        entry.epoch += 1
        entry.owner_gateway = self._gateway_id
        self._renew(entry)
        return entry.epoch

    async def renew(self, epochs: dict[str, int]) -> dict[str, bool]:
        renewed = {}
        for reply_id, epoch in epochs.items():
            check_reply_id(reply_id)
            entry = self._store.find(reply_id)
            renewed[reply_id] = entry is not None and entry.epoch == epoch
            if entry is None or entry.epoch != epoch:
                continue
            if entry.terminal_seq is None:
                self._renew(entry)
                if entry.cancel_requested:
                    self._cancels.put(reply_id)
        return renewed

    async def attach(self, *reply_ids: str) -> None:
        for reply_id in reply_ids:
            check_reply_id(reply_id)
            entry = self._store.find(reply_id)
            if entry is not None:
                entry.marks[self._gateway_id] = self._store.clock() + self._mark_s

    async def detach(self, reply_id: str) -> None:
        check_reply_id(reply_id)
        entry = self._store.find(reply_id)
        if entry is not None:
            entry.marks.pop(self._gateway_id, None)

    async def is_attached(self, reply_id: str) -> bool:
        check_reply_id(reply_id)
        entry = self._store.find(reply_id)
        now = self._store.clock()
        return entry is not None and any(expiry > now for expiry in entry.marks.values())

    async def request_cancel(self, reply_id: str) -> None:
        entry = self._store.get(reply_id)
        if entry.terminal_seq is None:
            entry.cancel_requested = True
            self._store.cancels.setdefault(entry.owner_gateway, IdQueue()).put(reply_id)

    async def cancels(self) -> AsyncIterator[str]:
        while True:
            yield await self._cancels.get()

    def _new_entry(self, meta: ReplyMeta, epoch: int) -> _Entry:
        return _Entry(
            meta=meta,
            epoch=epoch,
            owner_gateway=self._gateway_id,
            lease_token=uuid.uuid4().hex,
            expires_at=self._store.clock() + self._safety_ttl_s,
        )

    def _renew(self, entry: _Entry) -> None:
        entry.lease_token = uuid.uuid4().hex
        entry.expires_at = self._store.clock() + self._safety_ttl_s

    def _append(self, pending: PendingAppend) -> list[AppendResult]:
        entry = self._store.find(pending.reply_id)
        if entry is None:
            gone = pending.reply_id in self._store.tombstones
            outcome = AppendOutcome.FENCED if gone else AppendOutcome.GAP
            return [AppendResult(outcome, 1)] * len(pending.events)
        if pending.epoch < entry.epoch:
            return [AppendResult(AppendOutcome.FENCED, len(entry.events) + 1)] * len(pending.events)
        if pending.epoch > entry.epoch:
            entry.epoch, entry.owner_gateway = pending.epoch, self._gateway_id
        outcomes = [self._append_one(entry, event) for event in pending.events]
        if AppendOutcome.APPENDED in outcomes:
            entry.status = pending.status
            entry.grown.beat()
            if entry.terminal_seq is not None:
                entry.expires_at = self._store.clock() + self._reply_ttl_s
                self._store.bury(pending.reply_id, entry.expires_at + TOMBSTONE_S)
        return [AppendResult(outcome, len(entry.events) + 1) for outcome in outcomes]

    def _append_one(self, entry: _Entry, event: Event) -> AppendOutcome:
        if 1 <= event.seq <= len(entry.events):
            same = entry.events[event.seq - 1].epoch == event.epoch
            return AppendOutcome.DUPLICATE if same else AppendOutcome.FENCED
        if entry.terminal_seq is not None or event.seq < 1:
            return AppendOutcome.FENCED
        if event.seq != len(entry.events) + 1:
            return AppendOutcome.GAP
        entry.events.append(event if event.logged else replace(event, logged=True))
        return AppendOutcome.APPENDED
