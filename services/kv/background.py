"""Jobs that run one after another in a pool's thread, while the event loop goes on.

A trip to a thread and back costs about as much as copying a quarter of a page, and more where cores are
busy. So jobs that have queued up meanwhile share one trip.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor


class Background:
    """One owner's jobs. Belongs to the running event loop; only the jobs themselves run elsewhere.

    Invariant: after `stop` no job runs, and none will.

    Args:
        on_change: called on the event loop after jobs have ended or failed.
    """

    def __init__(self, threads: Executor, on_change: Callable[[], None]) -> None:
        self._threads = threads
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Callable[[], None]] = deque()
        self._trip: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_stopped = False
        self._is_told = False  # on_change has been scheduled and not been called yet

    @property
    def num_unfinished(self) -> int:
        return len(self._jobs)

    def start(self, job: Callable[[], None]) -> None:
        """Runs it after those before it. Raises what one of these has raised; then none runs any more."""
        self.check()
        self._jobs.append(job)
        self._send()

    def check(self) -> None:
        """Raises what a job has raised."""
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Waits for the job in progress; those behind it never run. Idempotent."""
        self._is_stopped = True
        if self._trip is not None:
            await asyncio.wait((self._trip,))
        self._jobs.clear()
        self._error = None  # whose traceback holds what the jobs held

    def _send(self) -> None:
        if self._trip is None and self._jobs and not self._is_stopped:
            self._trip = self._loop.run_in_executor(self._threads, self._run)
            self._trip.add_done_callback(self._end)

    def _end(self, trip: "asyncio.Future[None]") -> None:
        self._trip = None
        if trip.cancelled():
            return
        self._error = trip.exception()
        if self._error is None:
            self._send()  # what was started after the thread's last look
        self._on_change()

    def _run(self) -> None:
        """In a thread. Not what is started meanwhile: others wait for the thread, too."""
        for _ in range(len(self._jobs)):
            if self._is_stopped:
                return
            self._jobs[0]()
            self._jobs.popleft()
            if not self._is_told and not self._loop.is_closed():
                self._is_told = True
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._is_told = False
        self._on_change()
