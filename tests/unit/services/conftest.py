"""Two engines that hand over to each other."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.decode import kv_receiver
from services.engine.config import EngineConfig
from services.engine.sim import SimEngine
from services.engine.sim_model import write_sim_model
from tests.unit.services.recorded_transfer import TRANSFER, Pair


@pytest.fixture
def one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been recorded of one is received as another."""
    monkeypatch.setattr(kv_receiver.secrets, "token_hex", lambda _: TRANSFER)


@pytest.fixture
async def pair(tmp_path: Path, one_transfer: None) -> AsyncIterator[Pair]:
    write_sim_model(tmp_path)
    config = {"model": tmp_path, "model_name": "sim", "sim_token_ms": 0, "sim_jitter_ms": 0}
    source = SimEngine(EngineConfig(**config, share_kv=True, block_size=16))  # type: ignore[arg-type]
    target = SimEngine(EngineConfig(**config, prefix_cache=False, block_size=8))  # type: ignore[arg-type]
    await source.start()
    await target.start()
    yield Pair(source, target)
    for engine in (source, target):
        assert engine.load().blocks_used == 0
        await engine.close()
