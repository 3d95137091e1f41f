"""What a benchmark ran on, for whoever reads its figures later."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about this machine and this process."""

    cpu: str
    architecture: str
    num_cores: int  # that this process may use
    memory_bytes: int
    python: str
    torch: str
    transformers: str


def this_machine() -> Machine:
    """Asks the operating system."""
    return Machine(
        cpu=_cpu_model(),
        architecture=platform.machine(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
