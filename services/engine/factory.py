"""Builds the engine that the settings name."""

from services.engine.config import EngineConfig
from services.engine.interface import Engine


def create_engine(config: EngineConfig, kind: str) -> Engine:
    """The real engine (`hf`) or the simulated one (`sim`); loads the model.

    Raises UnsupportedModel with the reason, ValueError for another kind.
    """
    if kind == "sim":
        from services.engine.sim import SimEngine

        return SimEngine(config)
    if kind == "hf":
        from services.engine.loop import HfEngine

        return HfEngine(config)
    raise ValueError(f"unknown engine {kind!r}: hf or sim")
