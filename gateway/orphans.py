"""Replies whose owner may be dead: watched one at a time, taken over, then ended or gone on with.

Invariant: whoever is looked after is looked after once, however many ask; an owner that shows a sign of
life keeps its reply. Must not know: how replies are read or generated.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from gateway.endings import cancelled_ending
from gateway.event_log import EventLog, LogUnavailable, ReplyGone, ReplyUnknown
from gateway.owned_reply import OwnedReply, ReplyClosed

_log = logging.getLogger(__name__)


class Orphans:
    """Looks after replies that other gateways own.

    Args:
        take_over: waits for the owner's lease to lapse and claims the reply; None if the owner lives.
        spawn: runs a coroutine in the background.
    """

    def __init__(
        self,
        log: EventLog,
        take_over: Callable[[str], Awaitable[OwnedReply | None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._log = log
        self._take_over = take_over
        self._spawn = spawn
        self._watched: set[str] = set()
        self.go_on: Callable[[OwnedReply], None] | None = None  # continues a generation

    def cancel(self, reply_id: str) -> None:
        """Ends a reply whose cancel was asked for, if its owner cannot."""
        self._look_after(reply_id, self._end)

    def rescue(self, reply_id: str) -> None:
        """Goes on with a reply that somebody here reads and nobody writes."""
        if self._log.is_durable and self.go_on is not None:
            self._look_after(reply_id, self._continue)

    def _look_after(self, reply_id: str, action: Callable[[OwnedReply], Awaitable[None]]) -> None:
        if reply_id not in self._watched:
            self._watched.add(reply_id)
            self._spawn(self._looking_after(reply_id, action))

    async def _looking_after(self, reply_id: str, action: Callable[[OwnedReply], Awaitable[None]]) -> None:
        try:
            reply = await self._take_over(reply_id)
            if reply is not None:
                _log.warning(
                    "reply %s taken over from a gateway that is gone (epoch %d)", reply_id, reply.epoch
                )
                await action(reply)
        except (ReplyClosed, ReplyUnknown, ReplyGone, LogUnavailable) as error:
            _log.warning("reply %s could not be taken over: %r", reply_id, error)
        finally:
            self._watched.discard(reply_id)

    async def _end(self, reply: OwnedReply) -> None:
        for kind, payload in cancelled_ending(reply.meta, reply.events):
            reply.emit(kind, payload)

    async def _continue(self, reply: OwnedReply) -> None:
        assert self.go_on is not None
        if (await self._log.state(reply.meta.reply_id)).cancel_requested:
            await self._end(reply)
        else:
            self.go_on(reply)
