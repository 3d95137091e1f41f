"""Loopback ports: is one free, and which one may a worker take.

Workers get ports below the range that the kernel hands out for outgoing connections, so that none is
taken by chance between the choice and the moment the worker has loaded its model and binds it.
"""

import random
import socket

from cli.errors import CommandError

HOST = "127.0.0.1"
_FIRST, _LAST = 20_000, 32_000


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        # As servers do: a connection that has only just closed does not count as "in use".
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def pick(count: int) -> list[int]:
    """`count` different free ports."""
    candidates = random.SystemRandom().sample(range(_FIRST, _LAST), _LAST - _FIRST)
    free = (port for port in candidates if is_free(port))
    return [next(free) for _ in range(count)]


def check_free(first: int, count: int) -> None:
    """Raises CommandError naming the first port of the range that somebody listens on."""
    for port in range(first, first + count):
        if port > 65535 or not is_free(port):
            needed = f" (the gateways need {first} to {first + count - 1})" if count > 1 else ""
            raise CommandError(f"port {port} is in use{needed}: choose another with --port")
