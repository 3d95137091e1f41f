"""What commands print: progress to stderr, one line each, also where there is no terminal.

Results (a reply's text, JSON) go to stdout and nowhere else, so that they can be piped.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(message: str) -> None:
    """One line of progress."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """One line for something that takes a while: what, at its begin, and the seconds, at its end."""
    print(f"{what} ...", end=" ", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        yield
    except BaseException:
        say("failed")
        raise
    say(f"{time.monotonic() - started:.1f} s")
