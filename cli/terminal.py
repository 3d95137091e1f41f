"""What commands print: progress to stderr, one line each, also where there is no terminal.

Results (a reply's text, JSON) go to stdout and nowhere else, so that they can be piped.
"""

import sys


def say(message: str) -> None:
    """One line of progress."""
    print(message, file=sys.stderr, flush=True)
