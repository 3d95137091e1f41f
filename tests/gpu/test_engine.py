"""The engine on a GPU, in bf16: replies, decode graphs and KV pages."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.engine.decode_graph import CudaCapture, DecodeGraphs
from services.engine.device import Device
from services.engine.kv_cache import KvCache
from services.engine.model_runner import ModelRunner
from services.engine.page_range import PageRange
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.varlen import varlen_kernel
from tests.unit.engine.tiny_models import complete, make_request, running_engine, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CUDA = torch.device("cuda")
NUM_TOKENS = 48
PROMPTS = [[(11 * i + 5 * n) % 900 + 3 for i in range(n)] for n in (1, 7, 16, 33, 90, 300)]
# Of the largest logit: bf16 keeps 8 bits, and two tokens closer than this are a tie.
TIE = 0.03


def count_worse_than_a_tie(folder: Path, prompt: list[int], reply: list[int]) -> int:
    """Tokens of a greedy reply whose logit is clearly below the best, by transformers in bf16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(CUDA)
    ids = torch.tensor([prompt + reply], device=CUDA)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    taken = logits.gather(1, torch.tensor(reply, device=CUDA).unsqueeze(1)).squeeze(1)
    return int((logits.amax(1) - taken > TIE * logits.abs().amax(1)).sum())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("block_size", [16, 256])
async def test_greedy_replies_are_those_of_transformers_but_for_ties(
    tmp_path: Path, family: str, block_size: int
) -> None:
    folder = save_model(tmp_path, family)
    async with running_engine(
        folder, device=Device.CUDA, block_size=block_size, prefill_chunk=64, max_num_seqs=8
    ) as engine:
        replies = await asyncio.gather(*(complete(engine, make_request(p, NUM_TOKENS)) for p in PROMPTS))
        assert engine.load().blocks_used == 0
    for prompt, (tokens, _) in zip(PROMPTS, replies, strict=True):
        assert count_worse_than_a_tie(folder, prompt, tokens) == 0


def decode_chunks(runner: ModelRunner, cache: KvCache) -> list[ScheduledChunk]:
    """One decode chunk for each of PROMPTS, whose earlier positions are in the cache."""
    free = list(range(cache.scratch_block))
    chunks = []
    for prompt in PROMPTS:
        blocks = [free.pop() for _ in range(-(-len(prompt) // cache.block_size))]
        sequence: Any = SimpleNamespace(token_ids=prompt, block_table=blocks, num_tokens=len(prompt))
        if len(prompt) > 1:
            runner.forward([ScheduledChunk(sequence, 0, len(prompt) - 1)])
        chunks.append(ScheduledChunk(sequence, len(prompt) - 1, len(prompt)))
    return chunks


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_replayed_graph_equals_the_dynamic_pass(tmp_path: Path, family: str, block_size: int) -> None:
    runner = ModelRunner(save_model(tmp_path, family), device=Device.CUDA)
    cache = KvCache(runner.layout, 64, block_size, CUDA)
    runner.bind(cache)
    chunks = decode_chunks(runner, cache)
    graphs = DecodeGraphs(
        runner.compute,
        cache,
        max_num_seqs=8,
        max_model_len=512,
        kernel=varlen_kernel(CUDA, runner.layout.head_size, block_size),
        capture=CudaCapture(),
    )
    for batch in (1, 2, 3, 6, 3, 1):
        expected = runner.forward(chunks[:batch])
        logits = graphs.run(chunks[:batch]).float().cpu()
        error = float((logits - expected).norm() / expected.norm())
        assert error < TIE, f"batch {batch}"


def test_a_row_does_not_depend_on_its_company_through_block_tables(tmp_path: Path) -> None:
    """Of attention alone: matrix products may take other kernels for other numbers of rows."""
    runner = ModelRunner(save_model(tmp_path), device=Device.CUDA)
    cache = KvCache(runner.layout, 64, 256, CUDA)
    runner.bind(cache)
    chunks = decode_chunks(runner, cache)
    six = runner.forward(chunks)
    for i, chunk in enumerate(chunks):
        copies = runner.forward([chunk] * len(chunks))  # as many rows, other neighbours
        assert torch.equal(copies[0], six[i])


def test_pages_leave_and_enter_the_gpu_unchanged(tmp_path: Path) -> None:
    runner = ModelRunner(save_model(tmp_path), device=Device.CUDA)
    source, target = (KvCache(runner.layout, 8, 16, CUDA) for _ in range(2))
    for layer in source.layers:
        layer.keys.normal_()
        layer.values.normal_()
    page = source.export_range([5, 2, 7], PageRange(0, 3, 3, 40))
    assert page.device.type == "cpu"
    assert page.shape == (3, 2, 37, runner.layout.num_kv_heads, runner.layout.head_size)
    payload = memoryview(page.view(torch.uint8).numpy().tobytes())
    where = PageRange(0, 3, 3, 40)
    target.import_range([1, 6, 0], where, target.read_page(where, payload))
    assert torch.equal(target.export_range([1, 6, 0], where), page)
