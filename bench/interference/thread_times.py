"""What a process's threads got of their cores: time they ran, and time they were ready and had to wait.

From `/proc/<pid>/task/<tid>/schedstat`, so from outside and for nothing. A worker has two threads that
matter: the first one runs the event loop, and of the others the engine's is the one that works most.
"""

from dataclasses import dataclass
from pathlib import Path

_NS = 1e9


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Seconds within a window.

    Attributes:
        engine_ran_s, loop_ran_s, others_ran_s: on a core. The others are gRPC's and torch's.
        engine_waited_s: ready to run, while another thread had the core.
    """

    engine_ran_s: float
    engine_waited_s: float
    loop_ran_s: float
    others_ran_s: float


Snapshot = dict[int, tuple[float, float]]  # thread -> seconds on a core, seconds waiting for one


def snapshot(pid: int) -> Snapshot:
    """Every thread now; nothing where the system does not tell."""
    found: Snapshot = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            ran, waited, _ = file.read_text().split()
        except (OSError, ValueError):
            continue  # a thread that has just ended
        found[int(file.parent.name)] = (int(ran) / _NS, int(waited) / _NS)
    return found


def between(pid: int, before: Snapshot, after: Snapshot) -> ThreadTimes | None:
    """What happened between two snapshots of a process; None if there is no telling."""
    none = (0.0, 0.0)
    spent = {
        thread: (ran - before.get(thread, none)[0], waited - before.get(thread, none)[1])
        for thread, (ran, waited) in after.items()
    }
    loop = spent.pop(pid, None)
    if loop is None or not spent:
        return None
    engine = max(spent, key=lambda thread: spent[thread][0])
    engine_ran, engine_waited = spent.pop(engine)
    return ThreadTimes(engine_ran, engine_waited, loop[0], sum(ran for ran, _ in spent.values()))
