"""In the exact mode a reply is the same to the last bit, whatever else runs and however it is cut up.

Compared are tokens and the log-probabilities of the best ones, with `==`: those show each bit of the logits
that could ever tip a token. Greedy and seeded replies; each is computed alone first, without a prefix cache.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cli.model import ensure_default_model
from services.engine.loop import HfEngine
from services.engine.request import EngineRequest, SampledToken, SubmitMode
from tests.unit.engine.tiny_models import make_request, running_engine, save_model

SAMPLINGS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2},
)
# Prompts cut into few and many chunks, steps of few and many sequences, blocks of odd sizes.
COMPANIES: dict[str, dict[str, int]] = {
    "defaults": {},
    "few at once, small chunks": {"max_num_seqs": 5, "prefill_chunk": 7, "max_batched_tokens": 11},
    "many at once, odd blocks": {"max_num_seqs": 64, "max_batched_tokens": 300, "block_size": 5},
    "blocks of one": {"max_num_seqs": 9, "prefill_chunk": 16, "max_batched_tokens": 40, "block_size": 1},
    "large blocks": {"max_num_seqs": 24, "prefill_chunk": 33, "max_batched_tokens": 64, "block_size": 64},
}

Reply = list[SampledToken]


@dataclass(frozen=True)
class Workload:
    """Requests, and the reply of each when it is computed alone."""

    folder: Path
    requests: Sequence[EngineRequest]
    alone: Sequence[Reply]


async def reply_to(engine: HfEngine, request: EngineRequest) -> Reply:
    """The new tokens, with log-probabilities."""
    sequence = engine.submit(request, SubmitMode.LOCAL)
    try:
        return [token async for event in sequence.events() for token in event.tokens]  # type: ignore[union-attr]
    finally:
        sequence.release()


async def replies_to(engine: HfEngine, requests: Iterable[EngineRequest]) -> list[Reply]:
    """All at once."""
    return list(await asyncio.gather(*(reply_to(engine, request) for request in requests)))


async def make_workload(
    folder: Path, *, num_prompts: int, longest: int, vocabulary: int, num_tokens: int
) -> Workload:
    """Prompts of random lengths, one in eight long, some with a beginning in common."""
    rng = random.Random(11)
    beginning = [rng.randrange(3, vocabulary) for _ in range(longest)]
    requests = []
    for number in range(num_prompts):
        length = rng.randint(1, longest if number % 8 == 0 else longest // 8)
        own = rng.choice([length, length, rng.randint(1, length)])
        prompt = [*beginning[: length - own], *(rng.randrange(3, vocabulary) for _ in range(own))]
        sampling = {**SAMPLINGS[number % len(SAMPLINGS)], "seed": number, "logprobs": 2, "ignore_eos": True}
        requests.append(make_request(prompt, rng.randint(2, num_tokens), **sampling))
    async with running_engine(folder, prefix_cache=False) as engine:
        alone = [await reply_to(engine, request) for request in requests]
    assert all(len(token.top_logprobs) == 2 for reply in alone for token in reply)
    return Workload(folder, requests, alone)


def _pool(workload: Workload, **config: int) -> dict[str, int]:
    """Room for every sequence that may run."""
    return {"kv_memory_bytes": 2**28, "max_queue_len": len(workload.requests), **config}


async def check_company(workload: Workload, config: dict[str, int]) -> None:
    order = random.Random(3).sample(range(len(workload.requests)), len(workload.requests))
    async with running_engine(workload.folder, **_pool(workload, **config)) as engine:
        replies = await replies_to(engine, [workload.requests[number] for number in order])
    assert replies == [workload.alone[number] for number in order]


async def check_continuations(workload: Workload, config: dict[str, int]) -> None:
    """Each is cut at a random place; the rest is computed in the company of the other rests."""
    rng = random.Random(5)
    cuts = [rng.randint(1, len(reply) - 1) for reply in workload.alone]
    requests = [
        replace(request, generated_token_ids=tuple(token.token_id for token in reply[:cut]))
        for request, reply, cut in zip(workload.requests, workload.alone, cuts, strict=True)
    ]
    expected = [reply[cut:] for reply, cut in zip(workload.alone, cuts, strict=True)]
    async with running_engine(workload.folder, **_pool(workload, **config)) as engine:
        assert await replies_to(engine, requests) == expected


async def check_prefix_hits(workload: Workload, config: dict[str, int]) -> None:
    """The same again, and then each reply as a part of the prompt."""
    async with running_engine(workload.folder, **_pool(workload, **config)) as engine:
        assert await replies_to(engine, workload.requests) == workload.alone
        computed = engine.load().prompt_tokens_computed
        assert await replies_to(engine, workload.requests) == workload.alone
        again = engine.load().prompt_tokens_computed - computed
        assert again < computed / 2, "the cache was of no use"
        longer = [
            replace(request, prompt_token_ids=(*request.prompt_token_ids, *(t.token_id for t in reply)))
            for request, reply in zip(workload.requests, workload.alone, strict=True)
        ]
        hits = await replies_to(engine, longer)
    async with running_engine(workload.folder, prefix_cache=False) as engine:
        assert hits == [await reply_to(engine, request) for request in longer]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    # Wide enough that matrix products are cut up as a real model's are: narrower ones would hide a fault.
    wide = {"hidden_size": 192, "intermediate_size": 384, "head_dim": 32}
    folder = save_model(tmp_path_factory.mktemp("llama"), **wide)
    return asyncio.run(make_workload(folder, num_prompts=64, longest=480, vocabulary=900, num_tokens=8))


@pytest.fixture(scope="module")
def real() -> Workload:
    folder = ensure_default_model()
    return asyncio.run(make_workload(folder, num_prompts=16, longest=240, vocabulary=40_000, num_tokens=4))


@pytest.mark.parametrize("config", COMPANIES.values(), ids=COMPANIES)
async def test_company_chunks_and_blocks_change_no_bit(tiny: Workload, config: dict[str, int]) -> None:
    await check_company(tiny, config)


@pytest.mark.parametrize("config", [COMPANIES["defaults"], COMPANIES["few at once, small chunks"]])
async def test_a_continuation_changes_no_bit(tiny: Workload, config: dict[str, int]) -> None:
    await check_continuations(tiny, config)


@pytest.mark.parametrize("config", [COMPANIES["many at once, odd blocks"], COMPANIES["large blocks"]])
async def test_a_prefix_from_the_cache_changes_no_bit(tiny: Workload, config: dict[str, int]) -> None:
    await check_prefix_hits(tiny, config)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_nothing_changes_a_bit_of_the_real_models_replies(real: Workload) -> None:
    await check_company(real, COMPANIES["few at once, small chunks"])
    await check_company(real, COMPANIES["many at once, odd blocks"])
    await check_continuations(real, COMPANIES["defaults"])
    await check_prefix_hits(real, COMPANIES["defaults"])
