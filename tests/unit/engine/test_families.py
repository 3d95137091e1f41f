"""Any decoder-only model, without code of its own: greedy replies equal transformers' `generate`."""

import asyncio
from pathlib import Path

import pytest

from tests.unit.engine.tiny_models import (
    FAMILIES,
    complete,
    generate,
    make_request,
    running_engine,
    save_model,
)

NUM_TOKENS = 64
PROMPTS = [[(11 * i + 5 * n) % 900 + 3 for i in range(n)] for n in (1, 16, 33, 90)]
FEWEST_KINDS = 12  # of tokens in a reply: one that repeats itself would show little

# One of each kind in every run: plain, sliding window, learned positions, soft-capped scores.
_QUICK = ("llama", "mistral", "gpt2", "gemma2")


@pytest.mark.parametrize(
    "family",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
async def test_greedy_equals_generate_alone_and_together(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path, family)
    expected = generate(folder, PROMPTS, NUM_TOKENS)
    assert all(len(set(tokens)) >= FEWEST_KINDS for tokens in expected), "the weights say too little"
    # A prompt takes several steps, and other prompts and replies share them.
    async with running_engine(folder, prefill_chunk=20, max_batched_tokens=40) as engine:
        alone = [(await complete(engine, make_request(prompt, NUM_TOKENS)))[0] for prompt in PROMPTS]
        assert alone == expected
        together = await asyncio.gather(*(complete(engine, make_request(p, NUM_TOKENS)) for p in PROMPTS))
        assert [tokens for tokens, _ in together] == expected
        assert engine.load().blocks_used == 0
