"""Decode steps on static, padded buffers equal the dynamic forward pass, and touch nobody's blocks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.engine.block_manager import BlockManager
from services.engine.decode_graph import DecodeGraphs, Replay
from services.engine.device import Device
from services.engine.errors import UnsupportedModel
from services.engine.kv_cache import KvCache
from services.engine.model_runner import ModelRunner
from services.engine.page_range import PageRange
from services.engine.placement import resolve
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.varlen import VarlenKernel, varlen_kernel
from tests.unit.engine.plain_varlen import plain_varlen
from tests.unit.engine.tiny_models import save_model

BLOCK_SIZE = 16
LENGTHS = [5, 16, 17, 40, 1, 33, 300, 64]
NUM_BLOCKS = 60


class Setup:
    """A runner, a filled cache, and one decode chunk for each of LENGTHS."""

    def __init__(self, folder: Path, kernel: VarlenKernel | None = None) -> None:
        self.runner = ModelRunner(folder)
        self.cache = KvCache(self.runner.layout, NUM_BLOCKS, BLOCK_SIZE)
        self.runner.bind(self.cache)
        self.num_captures = 0
        self.graphs = DecodeGraphs(
            self.runner.compute,
            self.cache,
            max_num_seqs=6,
            max_model_len=512,
            kernel=kernel,
            capture=self._capture,
        )
        free = list(range(NUM_BLOCKS))
        self.chunks = []
        for number, length in enumerate(LENGTHS):
            ids = [(7 * i + 11 * number) % 900 + 3 for i in range(length)]
            blocks = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
            sequence: Any = SimpleNamespace(token_ids=ids, block_table=blocks, num_tokens=length)
            if length > 1:
                self.runner.forward([ScheduledChunk(sequence, 0, length - 1)])
            self.chunks.append(ScheduledChunk(sequence, length - 1, length))

    def _capture(self, function: Replay) -> Replay:
        self.num_captures += 1
        return function


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("kernel", [None, plain_varlen])
def test_a_padded_step_on_static_buffers_equals_the_dynamic_one(
    tmp_path: Path, family: str, kernel: VarlenKernel | None
) -> None:
    setup = Setup(save_model(tmp_path, family), kernel)
    for batch in (1, 2, 3, 5, 6, 4, 1):
        for start in range(0, len(LENGTHS) - batch + 1, 2):
            chunks = setup.chunks[start : start + batch]
            expected = setup.runner.forward(chunks)
            assert setup.graphs.can_run(chunks)
            logits = setup.graphs.run(chunks)
            assert logits.shape == expected.shape
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))
            if (
                family == "llama" and kernel is None and batch >= 3
            ):  # from 4 rows on, exactness holds here too
                assert torch.equal(logits, expected)


def test_steps_are_kept_by_padded_size(tmp_path: Path) -> None:
    setup = Setup(save_model(tmp_path))
    short = [chunk for chunk in setup.chunks if chunk.end < 256]
    for batch in (1, 2, 3, 4, 5, 6, 3):
        setup.graphs.run(short[:batch])
    assert setup.num_captures == 4, "sizes 1, 2, 4 and 6"
    setup.graphs.run(setup.chunks[4:7])  # one of them is longer than the shortest table
    assert setup.num_captures == 5
    assert not setup.graphs.can_run(setup.chunks[:7]), "more than fit"
    sequence = cast(Any, setup.chunks[3].sequence)
    assert not setup.graphs.can_run([ScheduledChunk(sequence, 10, 12)]), "a prompt"
    assert not setup.graphs.can_run([ScheduledChunk(sequence, 10, 11)]), "samples nothing"


def test_padding_writes_into_the_scratch_block_only(tmp_path: Path) -> None:
    setup = Setup(save_model(tmp_path))
    setup.runner.forward(setup.chunks[:3])
    whole = list(range(NUM_BLOCKS))
    layers = setup.runner.layout.num_layers
    before = setup.cache.export_range(whole, PageRange(0, layers, 0, NUM_BLOCKS * BLOCK_SIZE))
    setup.graphs.run(setup.chunks[:3])
    after = setup.cache.export_range(whole, PageRange(0, layers, 0, NUM_BLOCKS * BLOCK_SIZE))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert setup.cache.layers[0].key_blocks[setup.cache.scratch_block].any(), "padding wrote nowhere"


def test_nobody_owns_the_scratch_block(tmp_path: Path) -> None:
    setup = Setup(save_model(tmp_path))
    blocks = BlockManager(NUM_BLOCKS)
    assert setup.cache.scratch_block not in blocks.allocate(NUM_BLOCKS)


def test_the_variable_length_kernel_is_taken_where_it_can_read_the_pool() -> None:
    cuda = torch.device("cuda")
    assert varlen_kernel(torch.device("cpu"), 64, 256) is None
    assert varlen_kernel(cuda, 64, 16) is None
    assert varlen_kernel(cuda, 100, 256) is None
    assert varlen_kernel(cuda, 512, 256) is None
    assert varlen_kernel(cuda, 128, 512) is not None


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_mixed_step_through_block_tables_equals_the_gathered_one(tmp_path: Path, family: str) -> None:
    setup = Setup(save_model(tmp_path, family))
    long = cast(Any, setup.chunks[6].sequence)
    chunks = [setup.chunks[0], ScheduledChunk(long, 250, 300), setup.chunks[3], ScheduledChunk(long, 0, 30)]
    expected = setup.runner.forward(chunks)
    setup.runner.bind(setup.cache, plain_varlen)
    torch.testing.assert_close(setup.runner.forward(chunks), expected, rtol=1e-4, atol=1e-4)


def test_asking_for_a_gpu_where_there_is_none_fails_at_start(tmp_path: Path) -> None:
    assert resolve(Device.CPU) == torch.device("cpu")
    if torch.cuda.is_available():
        assert resolve(Device.AUTO).type == "cuda"
        return
    assert resolve(Device.AUTO) == torch.device("cpu")
    with pytest.raises(UnsupportedModel, match="BATON_DEVICE"):
        ModelRunner(save_model(tmp_path), device=Device.CUDA)
