"""How fast this process reads memory: a buffer far larger than any cache, summed up by torch.

Read only, and with the threads of the engines. The sum is the fastest of torch's reductions, so the
floor that follows from it is the lowest, and our share of it the smallest.
"""

import time

import torch

_NUM_PASSES = 4


class ReadBandwidth:
    """Holds the buffer; a measurement reads it several times."""

    def __init__(self, num_bytes: int) -> None:
        self._numbers = torch.ones(num_bytes // 4)

    def measure(self) -> float:
        """Bytes per second of the best pass."""
        best = min(self._pass_s() for _ in range(_NUM_PASSES))
        return self._numbers.nbytes / best

    def _pass_s(self) -> float:
        began = time.perf_counter()
        self._numbers.sum()
        return time.perf_counter() - began
