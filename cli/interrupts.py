"""Ctrl-C and SIGTERM at moments of our own choice.

A process that has just been born stands nowhere until it is recorded: an interrupt between the two
would leave it running with nobody to end it.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt if a signal has come; nothing else does so.

    For the main thread. What the caller's parent has told it to ignore stays ignored.
    """
    arrived: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        arrived.append(signum)

    def raise_if_any() -> None:
        if arrived:
            raise KeyboardInterrupt

    heeded = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = [(signum, signal.signal(signum, note)) for signum in heeded]
    try:
        yield raise_if_any
    finally:
        for signum, handler in previous:
            signal.signal(signum, handler)
