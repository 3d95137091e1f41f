"""Layers can be exported while those above them are still being computed, and are final by then."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from services.engine import layer_report
from services.engine.attention import OnLayer
from services.engine.kv_cache import KvLayout
from services.engine.layer_report import LayerReport
from services.engine.model_runner import ModelRunner
from services.engine.page_range import PageRange
from services.engine.request import FirstTokenSampled, KvComputed, SubmitMode
from services.engine.scheduled_chunk import ScheduledChunk
from tests.unit.engine.tiny_models import complete, hand_over, make_request, running_engine, save_model

NUM_LAYERS = 3
PROMPT = list(range(5, 45))


class _Halting(ModelRunner):
    """Goes on above the first layer only when told."""

    go_on: ClassVar[threading.Event] = threading.Event()

    def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
        def report(layer: int) -> None:
            assert on_layer is not None
            on_layer(layer)
            if layer == 0:
                assert self.go_on.wait(30)

        return super().forward(chunks, report if on_layer else None)


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports however small a layer is."""
    monkeypatch.setattr(layer_report, "_LEAST_BYTES", 1)


@pytest.mark.usefixtures("every_layer")
async def test_a_layer_is_exported_while_the_next_waits(tmp_path: Path) -> None:
    async with running_engine(save_model(tmp_path), _Halting, prefill_chunk=64) as engine:
        sequence = engine.submit(make_request(PROMPT, 4), SubmitMode.PREFILL_ONLY)
        events = sequence.events()
        async with asyncio.timeout(30):
            assert await anext(events) == KvComputed(0, 1, 0, len(PROMPT))
        first = await asyncio.to_thread(sequence.kv.export_page, PageRange(0, 1, 0, len(PROMPT)))
        _Halting.go_on.set()
        rest = [event async for event in events]
        assert rest[:-1] == [KvComputed(n, n + 1, 0, len(PROMPT)) for n in (1, 2)]
        assert isinstance(rest[-1], FirstTokenSampled)
        assert torch.equal(sequence.kv.export_page(PageRange(0, 1, 0, len(PROMPT))), first)
        assert float(first.abs().amin()) > 0
        sequence.release()


@pytest.mark.usefixtures("every_layer")
async def test_a_handoff_layer_by_layer_changes_nothing(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    async with running_engine(folder, prefill_chunk=16) as source, running_engine(folder) as target:
        alone = await complete(source, make_request(PROMPT, 12))
        sequence = target.submit(make_request(PROMPT, 12), SubmitMode.HANDOFF)
        await hand_over(source, target, sequence)
        tokens = []
        async for event in sequence.events():
            tokens += [token.token_id for token in event.tokens]  # type: ignore[union-attr]
        sequence.release()
        assert tokens == alone[0]


@pytest.mark.parametrize(
    ("order", "reported"),
    [((0, 1, 2, 3), [(0, 2), (2, 4)]), ((0, 2, 1, 3), [(0, 2)]), ((1, 0, 2, 3), []), ((0, 1), [(0, 2)])],
    ids=["in order", "swapped", "not from the first on", "cut off"],
)
async def test_what_is_reported_is_a_page_at_least_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], reported: list[tuple[int, int]]
) -> None:
    layout = KvLayout(num_layers=4, num_kv_heads=2, head_size=8)
    bytes_per_layer = 10 * layout.bytes_per_token // 4
    monkeypatch.setattr(layer_report, "_LEAST_BYTES", bytes_per_layer + 1)
    async with running_engine(save_model(tmp_path)) as engine:
        prefill = engine.submit(make_request(PROMPT, 4), SubmitMode.PREFILL_ONLY)
        local = engine.submit(make_request(PROMPT, 4), SubmitMode.LOCAL)
        seen = []
        chunks = [ScheduledChunk(prefill, 0, 10), ScheduledChunk(local, 0, 40)]
        report = LayerReport(chunks, layout, lambda sequence, event: seen.append((sequence, event)))
        for layer in order:
            report(layer)
        assert seen == [(prefill, KvComputed(*layers, 0, 10)) for layers in reported]
        assert report.num_layers == (reported[-1][1] if reported else 0)
        assert report.is_wanted
        assert not LayerReport(chunks[1:], layout, lambda *_: None).is_wanted
        prefill.release()
        local.release()
