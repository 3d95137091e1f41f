"""When a reply's owner may be taken for dead.

Rule: the same lease token seen for one full lease on this process's own monotonic clock, while the
log answered all the time. An outage restarts the watch, since the owner could not renew either.
Must not know: generations. Claiming is the caller's next step.
"""

import asyncio
from collections.abc import Callable

from gateway.event_log import EventLog, LogUnavailable


async def lapsed_lease(
    log: EventLog, reply_id: str, *, lease_s: float, clock: Callable[[], float]
) -> str | None:
    """The token to claim with, or None if the owner renewed or the reply has ended.

    Takes a full lease at least. Raises ReplyUnknown, ReplyGone.
    """
    token, since = "", 0.0
    while True:
        try:
            state = await log.state(reply_id)
        except LogUnavailable:
            token = ""
        else:
            if state.terminal_seq is not None or (token and state.lease_token != token):
                return None
            if not token:
                token, since = state.lease_token, clock()
            elif clock() - since >= lease_s:
                return token
        await asyncio.sleep(lease_s / 10)
