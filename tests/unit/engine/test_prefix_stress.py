"""Many sequences that share prefixes, in pools far too small: replies as if each were alone, and no leaks."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.engine.attention import OnLayer
from services.engine.config import EngineConfig
from services.engine.errors import EngineStopped
from services.engine.loop import HfEngine
from services.engine.model_runner import ModelRunner
from services.engine.page_range import PageRange
from services.engine.request import (
    EngineRequest,
    KvComputed,
    SamplingParams,
    SequenceFinished,
    SubmitMode,
)
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.sequence import EngineSequence
from tests.unit.engine.tiny_models import complete, make_request, running_engine, save_model
from tests.waiting import eventually

BYTES_PER_TOKEN = 2 * 3 * 2 * 8 * 4
SMALL_POOLS = [
    {"block_size": 1, "num_blocks": 30, "max_num_seqs": 8, "prefill_chunk": 3},
    {"block_size": 4, "num_blocks": 9, "max_num_seqs": 8, "prefill_chunk": 1},
    {"block_size": 16, "num_blocks": 2, "max_num_seqs": 1, "prefill_chunk": 7},
]
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


class _Counting(HfEngine):
    """Counts every position that a step has computed."""

    num_computed = 0

    def _count_computed(self, sequence: EngineSequence, start: int, end: int) -> None:
        self.num_computed += end - start
        super()._count_computed(sequence, start, end)


def _random_request(rng: random.Random, block_size: int) -> EngineRequest:
    """A prompt that begins like others, often a whole number of blocks long; at most 30 tokens in all."""
    trunk = rng.choice([range(5, 35), range(105, 135)])
    length = rng.choice([1, block_size, 2 * block_size, 2 * block_size + 1, rng.randrange(1, 25)])
    prompt = [*trunk[: min(length, 20)], *rng.sample(range(300, 340), rng.choice([0, 0, 1, 3]))]
    sampling = SamplingParams(
        max_tokens=(num_tokens := rng.choice([1, 2, 5, 30 - len(prompt)])),
        min_tokens=num_tokens,
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2),
    )
    return EngineRequest(
        request_id="stress",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        choice_index=rng.randrange(3),
        priority=rng.choice([0, 0, 1, 2]),
        cache_salt=rng.choice(["a", "b"]),
    )


async def _run(engine: HfEngine, request: EngineRequest, rng: random.Random) -> list[int] | None:
    """The reply; None if it was released before its end."""
    mode = rng.choice([SubmitMode.LOCAL, SubmitMode.LOCAL, SubmitMode.HANDOFF])
    most_events = rng.choice([0, 2, 99, 99, 99, 99])
    await asyncio.sleep(rng.random() * 0.1)
    sequence = engine.submit(request, mode)
    try:
        if mode is SubmitMode.HANDOFF:  # as if no prefill worker had delivered more than the first page
            await sequence.reserved()
            page, held = memoryview(bytes(BYTES_PER_TOKEN // 3)), sequence.num_held_tokens
            sequence.kv.import_page(PageRange(0, 1, held, held + 1), page)
            sequence.kv.reset()
            sequence.compute_locally()
        token_ids: list[int] = []
        async for event in sequence.events():
            token_ids += [token.token_id for token in event.tokens]  # type: ignore[union-attr]
            if isinstance(event, SequenceFinished):
                assert event.num_cached_tokens < len(request.prompt_token_ids)
                return token_ids
            if most_events == 0:
                return None
            most_events -= 1
        raise AssertionError("the events ended without a last one")
    finally:
        sequence.release()


@pytest.mark.parametrize("pool", SMALL_POOLS, ids=lambda pool: f"{pool['num_blocks']}x{pool['block_size']}")
async def test_replies_in_a_crowded_pool_are_those_computed_alone(llama: Path, pool: dict[str, int]) -> None:
    rng = random.Random(pool["num_blocks"])
    config = dict(pool)
    memory = config.pop("num_blocks") * pool["block_size"] * BYTES_PER_TOKEN
    requests = [_random_request(rng, pool["block_size"]) for _ in range(NUM_REQUESTS)]
    async with running_engine(llama, prefix_cache=False) as plain:
        alone = [(await complete(plain, request))[0] for request in requests]
    async with running_engine(llama, kv_memory_bytes=memory, **config) as engine:
        async with asyncio.timeout(60):
            replies = await asyncio.gather(*(_run(engine, request, rng) for request in requests))
        for request, reply, expected in zip(requests, replies, alone, strict=True):
            assert reply is None or reply == expected, request
        await eventually(lambda: _is_empty(engine))


def _is_empty(engine: HfEngine) -> bool:
    load = engine.load()
    return load.running == load.waiting == load.blocks_used == 0


async def test_a_preempted_continuation_counts_each_recomputed_token_once(llama: Path) -> None:
    prompt, continued, num_tokens = [3] * 7, [5] * 8, 24
    engine = _Counting(
        EngineConfig(
            model=llama,
            model_name="tiny",
            block_size=4,
            kv_memory_bytes=14 * 4 * BYTES_PER_TOKEN,
            prefix_cache=False,
        )
    )
    await engine.start()
    request = make_request(prompt, num_tokens, generated_token_ids=continued)
    await asyncio.gather(*(complete(engine, request) for _ in range(4)))
    fresh = 4 * (len(prompt) + num_tokens - 1 - len(continued))
    assert engine.load().tokens_recomputed > 4 * len(continued), "the pool was large enough for all"
    assert engine.load().tokens_recomputed == engine.num_computed - fresh
    await engine.close()


class _Picky(ModelRunner):
    """Cannot compute past position 8 of a prompt that begins with 99."""

    def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
        if any(chunk.sequence.token_ids[0] == 99 and chunk.end > 8 for chunk in chunks):
            raise RuntimeError("scripted")
        return super().forward(chunks, on_layer)


async def test_choices_that_cannot_be_computed_do_not_end_the_engine(llama: Path) -> None:
    engine = HfEngine(EngineConfig(model=llama, model_name="tiny"), runner_type=_Picky)
    await engine.start()
    choices = [engine.submit(make_request([99] * 20, 4), SubmitMode.LOCAL) for _ in range(5)]
    for choice in choices:
        with pytest.raises(EngineStopped, match="step failed"):
            await anext(choice.events())
        choice.release()
    assert len((await complete(engine, make_request([5] * 20, 4)))[0]) == 4
    assert engine.load().blocks_used == 0
    await engine.close()


async def test_what_a_failed_step_has_lost_cannot_be_exported(llama: Path) -> None:
    engine = HfEngine(EngineConfig(model=llama, model_name="tiny", prefill_chunk=8), runner_type=_Picky)
    await engine.start()
    sequence = engine.submit(make_request([99] * 20, 4), SubmitMode.PREFILL_ONLY)
    events = sequence.events()
    assert await anext(events) == KvComputed(0, 3, 0, 8)
    await eventually(lambda: engine.load().blocks_used == 0)
    with pytest.raises(EngineStopped):
        sequence.kv.export_page(PageRange(0, 1, 0, 8))
    with pytest.raises(EngineStopped):
        await anext(events)
    sequence.release()
    await engine.close()
