"""In fp32 a token's logits are the same to the bit, whatever the rest of the step and the cache look like."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.engine.kv_cache import KvCache
from services.engine.model_runner import ModelRunner
from services.engine.scheduler import ScheduledChunk
from tests.unit.engine.tiny_models import save_model

BLOCK_SIZE = 16
REAL_MODEL = Path.home() / ".cache/baton/models/smollm2-135m-instruct"


class Pool:
    """A runner with a cache whose blocks are handed out in random order."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self.runner = ModelRunner(folder)
        self.cache = KvCache(self.runner.layout, num_blocks, BLOCK_SIZE)
        self.runner.bind(self.cache)
        self._free = list(range(num_blocks))
        random.Random(5).shuffle(self._free)

    def sequence(self, num_tokens: int, seed: int) -> Any:
        draw = random.Random(seed)
        blocks = [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        ids = [draw.randrange(3, self.runner.vocab_size) for _ in range(num_tokens)]
        return SimpleNamespace(token_ids=ids, block_table=blocks, num_tokens=0)

    def run(self, *parts: tuple[Any, int, int]) -> list[torch.Tensor]:
        """One step over (sequence, start, end); the logits of each part's last token."""
        for sequence, _, end in parts:
            sequence.num_tokens = end
        chunks = [ScheduledChunk(cast(Any, sequence), start, end) for sequence, start, end in parts]
        return list(self.runner.forward(chunks))

    def prefill(self, sequence: Any, end: int, chunk: int = 64) -> None:
        for start in range(0, end, chunk):
            self.run((sequence, start, min(end, start + chunk)))


def check(folder: Path, lengths: list[int], num_blocks: int) -> None:
    """Every length: decoded alone, in company of many sizes, prefilled in chunks of many sizes."""
    pool = Pool(folder, num_blocks)
    sequences = [pool.sequence(length, seed) for seed, length in enumerate(lengths)]
    for sequence, length in zip(sequences, lengths, strict=True):
        pool.prefill(sequence, length - 1)
    decodes = [(sequence, length - 1, length) for sequence, length in zip(sequences, lengths, strict=True)]
    alone = [pool.run(decode)[0] for decode in decodes]
    for batch in (2, 3, 5, 16, 33):
        for start in range(0, len(decodes), batch):
            together = pool.run(*decodes[start : start + batch])
            for logits, expected in zip(together, alone[start:], strict=False):
                assert torch.equal(logits, expected), f"decoded in a batch of {batch}"
    for number, (sequence, length, expected) in enumerate(zip(sequences, lengths, alone, strict=True)):
        for chunk in (1, 2, 3, 7, 64, 256):
            start = max(0, length - chunk)
            assert torch.equal(pool.run((sequence, start, length))[0], expected), f"prefilled with {chunk}"
        neighbour = sequences[number - 1]
        mixed = pool.run((neighbour, 0, min(20, lengths[number - 1])), (sequence, length - 1, length))
        assert torch.equal(mixed[1], expected), "beside a prefill"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2", "olmo2"])
def test_logits_do_not_depend_on_the_rest_of_the_step(tmp_path: Path, family: str) -> None:
    lengths = [2, 3, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100, 130, 180, 193, 250, 370]
    check(save_model(tmp_path, family), lengths * 2, num_blocks=300)


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason="the default model is not here")
def test_logits_of_the_default_model_do_not_depend_on_the_rest_of_the_step() -> None:
    lengths = [2, 15, 16, 17, 33, 47, 64, 65, 129, 180, 193, 300, 511, 512, 513, 530, 700]
    check(REAL_MODEL, lengths + lengths[:10], num_blocks=450)
