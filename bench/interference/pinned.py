"""`python -m bench.interference.pinned CORES MODULE`: runs a module on these cores and no other.

Before anything of it is imported: threads keep the cores of whoever starts them.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    _, cores, module = sys.argv
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
