"""Measures decode steps against the bandwidth floor, and prefill against the matrix rate.

    python -m tests.gpu.measure /tmp/random-8b

Writes a Llama-3-8B-shaped model with random weights to the folder (16 GB) if it is not there. A decode step
reads all weights but the embedding, and the keys and values of its sequences; the floor is those bytes over
the bandwidth of a copy measured in the same run. Prefill counts 2 operations per token and weight (but the
vocabulary's, which one row meets), and those of attention, against a bf16 product of two 8,192-wide
matrices. The aim is 70% of each. `--layers`, `--hidden` and `--device cpu` make it small enough to try
without a GPU.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from services.engine.device import Device
from services.engine.kv_cache import KvCache
from services.engine.model_runner import ModelRunner
from services.engine.scheduled_chunk import ScheduledChunk

BATCHES = (1, 16, 64, 256)
_REPEATS = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=256)
    parser.add_argument("--max-batch", type=int, default=max(BATCHES))
    parser.add_argument("--device", type=Device, default=Device.CUDA)
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        _save_random_model(options)
    runner = ModelRunner(options.folder, device=options.device)
    num_blocks = options.max_batch * -(-options.context // options.block_size) + options.prompt
    cache = KvCache(runner.layout, num_blocks, options.block_size, runner.device)
    runner.bind(cache)
    runner.prepare_decode(options.max_batch, max(options.context, options.prompt))
    num_weights = _num_weights(options.folder)
    bytes_per_weight = runner.layout.torch_dtype.itemsize
    bandwidth, rate = _bandwidth(runner.device), _matrix_rate(runner.device)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, product {rate / 1e12:.1f} TFLOP/s")
    for batch in (size for size in BATCHES if size <= options.max_batch):
        chunks = _decode_chunks(options, batch)
        seconds = _time(lambda chunks=chunks: runner.forward(chunks), runner.device)  # type: ignore[misc]
        read = num_weights * bytes_per_weight + batch * options.context * runner.layout.bytes_per_token
        print(
            f"decode batch {batch}: {seconds * 1e3:.2f} ms, {batch / seconds:.0f} tokens/s, "
            f"{read / bandwidth / seconds:.0%} of the bandwidth floor"
        )
    prompt = _sequence(options.prompt, list(range(-(-options.prompt // options.block_size))))
    seconds = _time(lambda: runner.forward([ScheduledChunk(prompt, 0, options.prompt)]), runner.device)
    attention = 2 * options.layers * options.hidden * options.prompt**2  # half of 4: causal
    per_token = num_weights - options.hidden * options.vocabulary
    operations = 2 * per_token * options.prompt + attention
    print(
        f"prefill of {options.prompt}: {seconds * 1e3:.1f} ms, {operations / seconds / rate:.0%} of the rate"
    )


def _save_random_model(options: argparse.Namespace) -> None:
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 128,
        num_key_value_heads=max(1, options.hidden // 512),
        vocab_size=options.vocabulary,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(options.folder)


def _num_weights(folder: Path) -> int:
    """Those that a step reads whole: all but the embedding."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    return sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()


def _decode_chunks(options: argparse.Namespace, batch: int) -> list[ScheduledChunk]:
    width = -(-options.context // options.block_size)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(batch)]
    return [
        ScheduledChunk(_sequence(options.context, table), options.context - 1, options.context)
        for table in tables
    ]


def _sequence(num_tokens: int, blocks: list[int]) -> Any:
    return SimpleNamespace(
        token_ids=[i % 1000 for i in range(num_tokens)], block_table=blocks, num_tokens=num_tokens
    )


def _bandwidth(device: torch.device) -> float:
    """Bytes read and written in a second by a copy."""
    num_bytes = 2**32 if device.type == "cuda" else 2**28
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _time(lambda: target.copy_(source), device)


def _matrix_rate(device: torch.device) -> float:
    """Operations in a second of a product of square matrices."""
    width, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    matrix = torch.randn(width, width, dtype=dtype, device=device)
    return float(2 * width**3 / _time(lambda: matrix @ matrix, device))


def _time(function: Callable[[], object], device: torch.device) -> float:
    """Seconds, the median of several calls after two that set things up."""
    times = []
    for _ in range(_REPEATS + 2):
        started = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return sorted(times[2:])[_REPEATS // 2]


if __name__ == "__main__":
    main()
