"""Where a sequence stands."""

from enum import Enum, auto


class SequenceState(Enum):
    """Blocks are held in RESERVED and RUNNING, and in ENDED by PREFILL_ONLY."""

    WAITING = auto()
    RESERVED = auto()
    RUNNING = auto()
    ENDED = auto()
    RELEASED = auto()
