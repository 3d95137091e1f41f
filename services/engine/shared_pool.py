"""Memory for a KV pool that other processes of this host can map, and only read.

It is a file without a name: it takes no space on a file system, is not bounded by the size of a container's
/dev/shm, and is gone with the last process that has it mapped, however that ends. It is sealed: nobody can
shorten it, which would kill those who read it, and nobody but its owner can write to it.
"""

import fcntl
import mmap
import os
import secrets
import sys
from dataclasses import dataclass

import structlog
import torch

log = structlog.get_logger()

ID_BYTES = 16
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python's fcntl does not name it
_SEALS = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
    if sys.platform == "linux"
    else 0
)


@dataclass(frozen=True, slots=True)
class SharedPoolOffer:
    """What another process needs to map a pool: open /proc/<pid>/fd/<fd>, and compare the ID at its end.

    Elsewhere, or in another PID namespace, that is nothing, or something else: hence the ID.

    Attributes:
        num_bytes: of the pool, in front of the ID.
    """

    pool_id: bytes
    pid: int
    fd: int
    num_bytes: int


class SharedPool:
    """The owner's side. The memory stays mapped as long as a tensor over it lives."""

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.offer = SharedPoolOffer(secrets.token_bytes(ID_BYTES), os.getpid(), self._fd, num_bytes)
        try:
            os.ftruncate(self._fd, num_bytes + ID_BYTES)
            self._memory = mmap.mmap(self._fd, num_bytes + ID_BYTES)
            self._memory[num_bytes:] = self.offer.pool_id
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            self.close()
            raise

    def tensor(self) -> torch.Tensor:
        """All of it, as bytes; zeros at first."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=self.offer.num_bytes)

    def close(self) -> None:
        """Nobody finds it under the offer from now on. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def create_shared_pool(num_bytes: int) -> SharedPool | None:
    """None, with the reason in the log, where the system cannot."""
    if sys.platform != "linux":
        return None
    try:
        return SharedPool(num_bytes)
    except OSError as error:
        log.warning("the KV pool cannot be shared with other processes", reason=str(error))
        return None
