"""Where the model runs. Settings read this, so it must not load torch; `placement.py` acts on it."""

from enum import StrEnum


class Device(StrEnum):
    """The setting `BATON_DEVICE`."""

    AUTO = "auto"  # a GPU if there is one
    CPU = "cpu"
    CUDA = "cuda"
