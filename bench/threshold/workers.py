"""The two workers, as processes: each on cores of its own from its first instruction on, if there are any."""

import os
import sys
from collections.abc import Sequence

from bench.interference.arrangements import Arrangement
from bench.threshold.settings import Settings
from cli import ports
from cli.plan import Launch, Plan

PREFILL, DECODE = "prefill-0", "decode-0"
# The steady streams: short prompts, which decode computes itself.
STEADY = Arrangement("steady streams", "steady streams", DECODE)


def make_plan(settings: Settings, cores: Sequence[int]) -> Plan:
    """One worker of each role. Without enough cores to pin them to, they share what there is.

    Decode's threshold is 0, so that a prompt goes to the prefill worker if its request names one, and stays
    if it names none: the same engine mode as below the threshold, in the same process.
    """
    addresses = [f"{ports.HOST}:{port}" for port in ports.pick(2)]
    decodes = {"BATON_LOCAL_PREFILL": "fallback", "BATON_LOCAL_PREFILL_MAX_TOKENS": "0"}
    return Plan(
        (
            _launch(settings, PREFILL, addresses[0], own_cores(settings, cores, 0), {}),
            _launch(settings, DECODE, addresses[1], own_cores(settings, cores, 1), decodes),
        ),
        notices=(),
    )


def usable_cores() -> list[int]:
    """That this process may hold its workers to; none where the system cannot do that."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def own_cores(settings: Settings, cores: Sequence[int], worker: int) -> Sequence[int]:
    """Of the first worker or the second; none if there are not enough for both."""
    if len(cores) < 2 * settings.threads:
        return ()
    return cores[worker * settings.threads : (worker + 1) * settings.threads]


def _launch(
    settings: Settings, name: str, address: str, cores: Sequence[int], variables: dict[str, str]
) -> Launch:
    module = f"services.{name.rpartition('-')[0]}"
    pinned = ("bench.interference.pinned", ",".join(map(str, cores))) if cores else ()
    own = {
        "BATON_MODEL": str(settings.model),
        "BATON_ENGINE": "hf",
        "BATON_PRECISION": settings.precision.value,
        "BATON_LISTEN": address,
        "BATON_THREADS": str(settings.threads),
        "BATON_DRAIN_S": "2",  # the streams are cut when the measurement ends: nobody waits for them
        "OMP_NUM_THREADS": str(settings.threads),
        "PYTHONUNBUFFERED": "1",
    }
    return Launch(name, address, (sys.executable, "-m", *pinned, module), own | variables)
