"""The event log in Redis: survives a gateway, shared by all of them.

Invariant: every rule of the log is decided inside one script (event_log_lua.py), so gateways need no
agreement beyond Redis; and no call hangs: connect, socket and pool waits end after about a second
in LogUnavailable. Must not know: generations, formats, HTTP.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import orjson
from redis.exceptions import RedisError

from gateway import event_log_lua as lua
from gateway.event_log import (
    SCHEMA_VERSION,
    TOMBSTONE_S,
    AppendOutcome,
    AppendResult,
    LogUnavailable,
    PendingAppend,
    ReplyExists,
    ReplyGone,
    ReplyMeta,
    ReplyState,
    ReplyUnknown,
    check_reply_id,
    continuing,
)
from gateway.event_log_connection import connect, run_script, unavailable
from gateway.event_log_inbox import READER_SOCKET_TIMEOUT_S, Inbox
from gateway.event_log_lua import events_key, gone_key, meta_key, watch_key
from gateway.events import Event, EventKind, ReplyStatus

PAGE = 512
POLL_S = 1.0  # covers a lost wake hint

_OUTCOMES = {
    ord("A"): AppendOutcome.APPENDED,
    ord("D"): AppendOutcome.DUPLICATE,
    ord("G"): AppendOutcome.GAP,
    ord("F"): AppendOutcome.FENCED,
}
_STATE_FIELDS = ("status", "epoch", "last_seq", "terminal_seq", "cancel", "owner", "lease")
_META_FIELDS = frozenset(field.name for field in fields(ReplyMeta))


class RedisEventLog:
    """`EventLog` over one Redis. `url` as redis-py takes it: redis://, rediss://, unix://."""

    def __init__(
        self,
        redis_url: str,
        gateway_id: str,
        *,
        lease_s: float = 3.0,
        reply_ttl_s: float = 600.0,
        safety_ttl_s: float = 3600.0,
        max_connections: int = 16,
        poll_s: float = POLL_S,
    ) -> None:
        self._gateway_id = gateway_id
        self._mark_ms = int(2000 * lease_s)
        self._reply_ttl_ms = int(1000 * reply_ttl_s)
        self._safety_ttl_ms = int(1000 * safety_ttl_s)
        self._poll_s = poll_s
        self._redis = connect(redis_url, max_connections=max_connections)
        self._inbox = Inbox(
            gateway_id,
            writer=self._redis,
            connect_reader=lambda: connect(
                redis_url, max_connections=1, socket_timeout_s=READER_SOCKET_TIMEOUT_S
            ),
        )

    async def start(self) -> None:
        """Starts the inbox reader. A Redis that is down is no error: it is retried."""
        await self._inbox.start()

    async def close(self) -> None:
        await self._inbox.close()
        with suppress(RedisError, OSError):
            await self._redis.aclose()

    @property
    def is_durable(self) -> bool:
        return True

    async def healthy(self) -> bool:
        try:
            with unavailable():
                return bool(await self._redis.ping())
        except LogUnavailable:
            return False

    async def create(self, meta: ReplyMeta) -> int:
        keys = [meta_key(meta.reply_id), gone_key(meta.reply_id)]
        if not await self._run(lua.CREATE, keys, self._founding(meta)):
            raise ReplyExists(meta.reply_id)
        return 1

    async def restore(self, meta: ReplyMeta, epoch: int) -> bool:
        reply_id = meta.reply_id
        keys = [events_key(reply_id), meta_key(reply_id), gone_key(reply_id)]
        return bool(await self._run(lua.RESTORE, keys, [*self._founding(meta), epoch]))

    async def append(self, batch: Sequence[PendingAppend]) -> list[list[AppendResult]]:
        """One EVALSHA for the whole batch. (Redis Cluster: one per slot; see event_log_lua.py.)"""
        if not batch:
            return []
        for pending in batch:
            check_reply_id(pending.reply_id)
        keys = [meta_key(pending.reply_id) for pending in batch]
        tombstone_ms = self._reply_ttl_ms + int(1000 * TOMBSTONE_S)
        packed = orjson.dumps([_packed(pending) for pending in batch])
        args = [self._gateway_id, self._reply_ttl_ms, tombstone_ms, self._safety_ttl_ms, packed]
        results = []
        answers = await self._run(lua.APPEND, keys, args)
        for pending, (codes, expected_seq, *gateways) in zip(batch, answers, strict=True):
            results.append([AppendResult(_OUTCOMES[code], expected_seq) for code in codes])
            self._inbox.hint((name.decode() for name in gateways), pending.reply_id, expected_seq - 1)
        return results

    async def read(self, reply_id: str, after: int, limit: int = PAGE) -> list[Event]:
        page, _ = await self._page(reply_id, after, limit)
        return page

    async def follow(self, reply_id: str, after: int) -> AsyncGenerator[list[Event], None]:
        last: Event | None = None
        check_reply_id(reply_id)
        with self._inbox.listening(reply_id) as pulse:
            while True:
                hinted = pulse.next()
                page, terminal_seq = await self._page(reply_id, last.seq - 1 if last else after, PAGE)
                page = continuing(last, page)
                if page:
                    last = page[-1]
                    yield page
                    if page[-1].is_terminal:
                        return
                elif terminal_seq is not None:
                    return
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._poll_s):
                            await hinted.wait()

    async def meta(self, reply_id: str) -> ReplyMeta:
        check_reply_id(reply_id)
        with unavailable():
            doc = await self._redis.hget(meta_key(reply_id), "doc")
        if doc is None:
            raise await self._absence(reply_id)
        stored = orjson.loads(doc)
        known = {name: value for name, value in stored.items() if name in _META_FIELDS}  # a newer schema's
        return ReplyMeta(**known | {"prompt_token_ids": tuple(stored["prompt_token_ids"])})

    async def state(self, reply_id: str) -> ReplyState:
        check_reply_id(reply_id)
        with unavailable():
            values = await self._redis.hmget(meta_key(reply_id), _STATE_FIELDS)
        status, epoch, last_seq, terminal_seq, cancel, owner, lease = values
        if epoch is None:
            raise await self._absence(reply_id)
        return ReplyState(
            status=ReplyStatus(status.decode()),
            epoch=int(epoch),
            last_seq=int(last_seq),
            terminal_seq=int(terminal_seq) if terminal_seq is not None else None,
            cancel_requested=cancel is not None,
            owner_gateway=owner.decode(),
            lease_token=lease.decode(),
        )

    async def claim(self, reply_id: str, lease_token: str) -> int | None:
        keys = [meta_key(reply_id), events_key(reply_id), gone_key(reply_id)]
        check_reply_id(reply_id)
        args = [lease_token, uuid.uuid4().hex, self._gateway_id, SCHEMA_VERSION, self._safety_ttl_ms]
        epoch: int = await self._run(lua.CLAIM, keys, args)
        _raise_absence(reply_id, epoch)
        return epoch or None

    async def renew(self, epochs: dict[str, int]) -> dict[str, bool]:
        if not epochs:
            return {}
        keys = []
        for reply_id in epochs:
            check_reply_id(reply_id)
            keys += [events_key(reply_id), meta_key(reply_id)]
        args = [uuid.uuid4().hex, self._safety_ttl_ms, *epochs.values()]
        answers = dict(zip(epochs, await self._run(lua.RENEW, keys, args), strict=True))
        for reply_id, answer in answers.items():
            if answer == 2:  # covers a cancel that the inbox lost
                self._inbox.cancels.put(reply_id)
        return {reply_id: answer > 0 for reply_id, answer in answers.items()}

    async def attach(self, *reply_ids: str) -> None:
        keys = []
        for reply_id in reply_ids:
            check_reply_id(reply_id)
            keys += [meta_key(reply_id), watch_key(reply_id)]
        if keys:
            await self._run(lua.ATTACH, keys, [self._gateway_id, self._mark_ms])

    async def detach(self, reply_id: str) -> None:
        check_reply_id(reply_id)
        with suppress(ReplyUnknown), unavailable():
            await self._redis.hdel(watch_key(reply_id), self._gateway_id)

    async def is_attached(self, reply_id: str) -> bool:
        check_reply_id(reply_id)
        return bool(await self._run(lua.IS_ATTACHED, [watch_key(reply_id)], []))

    async def request_cancel(self, reply_id: str) -> None:
        check_reply_id(reply_id)
        owner = await self._run(lua.CANCEL, [meta_key(reply_id), gone_key(reply_id)], [])
        _raise_absence(reply_id, owner)
        if owner == self._gateway_id.encode():
            self._inbox.cancels.put(reply_id)
        elif owner:
            with unavailable():
                await self._inbox.send_cancel(owner.decode(), reply_id)

    async def cancels(self) -> AsyncIterator[str]:
        while True:
            yield await self._inbox.cancels.get()

    def _founding(self, meta: ReplyMeta) -> list[Any]:
        check_reply_id(meta.reply_id)
        doc = orjson.dumps(meta)  # dataclasses are native to it
        return [meta.schema, doc, self._gateway_id, uuid.uuid4().hex, self._safety_ttl_ms]

    async def _run(self, script: lua.Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await run_script(self._redis, script, keys, args)

    async def _page(self, reply_id: str, after: int, limit: int) -> tuple[list[Event], int | None]:
        """Events after the cursor, and the terminal seq if the reply has ended.

        Fewer than meta promises: the store has lost data, and the reply is unknown until its owner
        has restored it.
        """
        check_reply_id(reply_id)
        after = max(after, 0)
        pipeline = self._redis.pipeline(transaction=True)  # or a terminal event could slip in between
        pipeline.xrange(events_key(reply_id), min=f"{after + 1}-0", count=limit)
        pipeline.hmget(meta_key(reply_id), "last_seq", "terminal_seq")
        with unavailable():
            entries, (last_seq, terminal_seq) = await pipeline.execute()
        if last_seq is None or len(entries) < min(limit, int(last_seq) - after):
            raise await self._absence(reply_id)
        page = [
            Event(
                int(entry_id[:-2]),
                EventKind(fields[b"kind"].decode()),
                orjson.loads(fields[b"payload"]),
                int(fields[b"epoch"]),
            )
            for entry_id, fields in entries
        ]
        return page, int(terminal_seq) if terminal_seq is not None else None

    async def _absence(self, reply_id: str) -> ReplyUnknown | ReplyGone:
        with unavailable():
            gone = await self._redis.exists(gone_key(reply_id))
        return ReplyGone(reply_id) if gone else ReplyUnknown(reply_id)


def _packed(pending: PendingAppend) -> list[Any]:
    events = [
        [event.seq, event.epoch, event.kind, event.is_terminal, orjson.dumps(event.payload).decode()]
        for event in pending.events
    ]
    return [pending.epoch, pending.status, events]


def _raise_absence(reply_id: str, answer: Any) -> None:
    if answer == -1:
        raise ReplyUnknown(reply_id)
    if answer == -2:
        raise ReplyGone(reply_id)
