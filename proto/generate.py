"""Generates the Python stubs of `proto/` into `baton/v1/` (used by make, CI and Docker).

The stubs are build products and are not committed. Run: `python proto/generate.py`.
"""

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs protoc over every `.proto` file; returns protoc's exit status."""
    sources = sorted((ROOT / "proto").rglob("*.proto"))
    scripts = Path(sys.executable).parent  # plugins of this environment, also when it is not on PATH
    well_known = resources.files("grpc_tools") / "_proto"
    status: int = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'proto'}",
            f"-I{well_known}",
            *(f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
            f"--python_out={ROOT}",
            f"--grpc_python_out={ROOT}",
            f"--mypy_out=quiet:{ROOT}",
            f"--mypy_grpc_out=quiet:{ROOT}",
            *map(str, sources),
        ]
    )
    if status == 0:
        for package in ("baton", "baton/v1"):
            (ROOT / package / "__init__.py").write_text("")
    return status


if __name__ == "__main__":
    sys.exit(main())
