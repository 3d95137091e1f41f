"""What all transfers of one worker share."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

NUM_KV_THREADS = 1
_MOST_KEPT = 16  # buffers: of three transfers at once


@dataclass(slots=True)
class KvTraffic:
    """Bytes of KV cache that crossed the wire since the process started."""

    sent: int = 0
    received: int = 0


class Staging:
    """Buffers that pages are received into, kept for the next one: fresh memory costs more than a copy.

    From any thread.
    """

    def __init__(self) -> None:
        self._kept: deque[bytearray] = deque(maxlen=_MOST_KEPT)

    def take(self, num_bytes: int) -> bytearray:
        """A buffer of so many bytes or more."""
        try:
            buffer = self._kept.pop()
        except IndexError:
            return bytearray(num_bytes)
        return buffer if len(buffer) >= num_bytes else bytearray(num_bytes)

    def give_back(self, buffer: bytearray) -> None:
        """Nobody reads it any more."""
        self._kept.append(buffer)


@dataclass(slots=True)
class KvResources:
    """Belongs to a worker.

    Attributes:
        threads: where pages are copied, and checksums computed and compared.
    """

    traffic: KvTraffic = field(default_factory=KvTraffic)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_KV_THREADS, thread_name_prefix="baton-kv")
    )
    staging: Staging = field(default_factory=Staging)
