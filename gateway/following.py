"""Following a reply from the log when another gateway owns it.

Invariant: never wrong text. A reader that holds an event of one epoch goes on only if the log holds
that very event; otherwise CursorConflict. A log that is briefly down, or being restored by its
owner, is waited for. Must not know: who owns the reply.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from gateway.event_log import CursorConflict, EventLog, LogUnavailable, ReplyGone, ReplyUnknown
from gateway.events import Event
from gateway.signals import Pulse

RETRY_S = 0.2


async def follow_from(
    log: EventLog,
    reply_id: str,
    after: int,
    after_epoch: int | None,
    *,
    patience_s: float,
    clock: Callable[[], float],
) -> AsyncGenerator[list[Event], None]:
    """Pages after the cursor until the terminal event.

    `after_epoch`: who wrote the event at the cursor, where the reader knows. Failures before the
    first answer are raised; later ones are waited out for `patience_s`, then raised.
    """
    cursor, epoch = after, after_epoch
    answered = after_epoch is not None and after > 0
    troubled_since: float | None = None
    while True:
        try:
            async with aclosing(_verified(log, reply_id, cursor, epoch)) as pages:
                async for page in pages:
                    answered, troubled_since = True, None
                    if page:
                        cursor, epoch = page[-1].seq, page[-1].epoch
                        yield page
            return
        except (LogUnavailable, ReplyUnknown):
            now = clock()
            troubled_since = now if troubled_since is None else troubled_since
            if not answered or now - troubled_since > patience_s:
                raise
        await asyncio.sleep(RETRY_S)


async def _verified(
    log: EventLog, reply_id: str, after: int, epoch: int | None
) -> AsyncGenerator[list[Event], None]:
    """`log.follow`, after a look at the event at the cursor; an empty page says that the log answered."""
    check = epoch is not None and after > 0
    if not check:
        state = await log.state(reply_id)
        if after > state.last_seq:
            raise CursorConflict(f"cursor {after} is ahead of the log")
        yield []
    async with aclosing(log.follow(reply_id, after - 1 if check else after)) as pages:
        async for page in pages:
            if check:
                if page[0].seq != after or page[0].epoch != epoch:
                    raise CursorConflict(f"event {after} was not written by epoch {epoch}")
                check = False
                page = page[1:]
            yield page
    if check:
        raise CursorConflict(f"the log ended before event {after}")


async def until_logged(
    log: EventLog,
    reply_id: str,
    seq: int,
    epoch: int | None,
    *,
    patience_s: float,
    clock: Callable[[], float],
) -> None:
    """Waits while a living owner may yet bring the log back to an event that a client holds.

    After an outage, and after a loss of data, the log lacks for a moment what was sent already.
    Returns when it holds `seq`, when it never will, or after `patience_s`. Raises LogUnavailable.
    """
    give_up_at = clock() + patience_s
    while True:
        try:
            state = await log.state(reply_id)
            taken_over = epoch is not None and state.epoch != epoch
            if state.last_seq >= seq or state.terminal_seq is not None or taken_over:
                return
        except ReplyGone:
            return
        except ReplyUnknown:
            pass  # lost for good, or not restored yet
        if clock() >= give_up_at:
            return
        await asyncio.sleep(RETRY_S)


class ReplyMoved(Exception):
    """The reply that was followed is owned here now: read it from memory."""


async def until_moved(
    pages: AsyncGenerator[list[Event], None],
    *,
    changes: Pulse,
    has_moved: Callable[[], bool],
    silence_s: float,
    on_silence: Callable[[], None],
) -> AsyncGenerator[list[Event], None]:
    """The non-empty pages of a source. Raises ReplyMoved once a change has made `has_moved` true.

    Args:
        silence_s: after so long without a page `on_silence` is called, again and again.
    """
    async with aclosing(pages):
        page = asyncio.ensure_future(anext(pages, None))
        change = asyncio.ensure_future(changes.next().wait())
        try:
            while not has_moved():
                done, _ = await asyncio.wait(
                    {page, change}, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    on_silence()
                if change in done:
                    change = asyncio.ensure_future(changes.next().wait())
                if page in done:
                    events = page.result()
                    if events is None:
                        return
                    if events:
                        yield events
                    page = asyncio.ensure_future(anext(pages, None))
            raise ReplyMoved
        finally:
            page.cancel()
            change.cancel()
            await asyncio.gather(page, change, return_exceptions=True)
