"""A gateway's own requests at one worker, as load: known exactly, and at once.

Invariant: each counts from its pick to its end, and only one that has got there can be part of the worker's
own report. Must not know: what is requested, what others have there.
"""


class Holds:
    """One worker's."""

    def __init__(self) -> None:
        self.num = 0
        self.num_there = 0  # admitted, so the next report counts them, too

    def take(self) -> "Hold":
        """Counts one more request, now."""
        self.num += 1
        return Hold(self)


class Hold:
    """One request. Both verbs are idempotent."""

    def __init__(self, holds: Holds) -> None:
        self._holds: Holds | None = holds
        self._is_there = False

    def arrive(self) -> None:
        """The worker has it."""
        if self._holds is not None and not self._is_there:
            self._is_there = True
            self._holds.num_there += 1

    def release(self) -> None:
        """It is load no more."""
        if self._holds is not None:
            self._holds.num -= 1
            self._holds.num_there -= self._is_there
            self._holds = None
