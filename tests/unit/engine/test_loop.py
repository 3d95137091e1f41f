"""The real engine equals transformers' `generate`, however a reply is computed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest
import torch

from services.engine.attention import OnLayer
from services.engine.config import EngineConfig
from services.engine.errors import (
    EngineStopped,
    InvalidKvPage,
    InvalidRequest,
    NoTokenToChoose,
    SequenceReleased,
)
from services.engine.loop import HfEngine
from services.engine.model_runner import ModelRunner
from services.engine.page_range import PageRange
from services.engine.request import SampledToken, SubmitMode
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.sequence import EngineSequence
from tests.unit.engine.tiny_models import (
    complete,
    end_in_order_of_arrival,
    generate,
    hand_over,
    make_request,
    read_out,
    running_engine,
    save_model,
)
from tests.waiting import eventually

NUM_TOKENS = 24
BLOCK_BYTES = 2 * 3 * 2 * 8 * 4 * 4  # of 4 tokens
PROMPTS = [[(11 * i + 5 * n) % 900 + 3 for i in range(n)] for n in (1, 7, 16, 33, 90)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
async def test_block_size_changes_nothing(llama: Path, block_size: int) -> None:
    expected = generate(llama, PROMPTS, NUM_TOKENS)
    async with running_engine(llama, block_size=block_size) as engine:
        replies = await asyncio.gather(*(complete(engine, make_request(p, NUM_TOKENS)) for p in PROMPTS))
    assert [tokens for tokens, _ in replies] == expected


async def test_preemption_changes_nothing(llama: Path) -> None:
    prompts = [[(3 * i + n) % 900 + 3 for i in range(20)] for n in range(6)]
    expected = generate(llama, prompts, NUM_TOKENS)
    async with running_engine(llama, block_size=4, kv_memory_bytes=30 * BLOCK_BYTES) as engine:
        replies = await asyncio.gather(*(complete(engine, make_request(p, NUM_TOKENS)) for p in prompts))
        assert [tokens for tokens, _ in replies] == expected
        assert engine.load().tokens_recomputed > 0, "the pool was large enough for all"
        assert engine.load().blocks_used == 0


async def test_who_gave_way_to_a_reservation_ends_before_it(llama: Path) -> None:
    async with (
        running_engine(llama) as source,
        running_engine(llama, block_size=4, kv_memory_bytes=8 * BLOCK_BYTES) as engine,
    ):
        replies = await end_in_order_of_arrival(engine, source)
    first, later = generate(llama, [range(3, 7)], 24), generate(llama, [range(50, 62)], 12)
    assert replies == [*first, *later]


async def test_choices_share_the_prompt_and_equal_those_computed_alone(llama: Path) -> None:
    requests = [
        replace(make_request(PROMPTS[3], NUM_TOKENS, temperature=1.0, seed=4), choice_index=choice)
        for choice in range(4)
    ]
    async with running_engine(llama, prefix_cache=False) as engine:
        alone = [(await complete(engine, request))[0] for request in requests]
        assert engine.load().blocks_cached == 0
    assert len({tuple(tokens) for tokens in alone}) == 4
    async with running_engine(llama, block_size=8) as engine:
        together = await asyncio.gather(*(complete(engine, request) for request in requests))
        assert [tokens for tokens, _ in together] == alone
        assert engine.load().prompt_tokens_computed == len(PROMPTS[3]) + 3
        assert engine.load().blocks_used == 0
        assert engine.load().blocks_cached > 0


async def test_a_shared_prefix_changes_nothing(llama: Path) -> None:
    """A conversation: each prompt is the one before, its reply, and a little more."""
    async with running_engine(llama, prefix_cache=False) as plain, running_engine(llama) as engine:
        prompt = PROMPTS[3]
        for turn in range(4):
            expected, _ = await complete(plain, make_request(prompt, NUM_TOKENS))
            before = engine.load().prompt_tokens_computed
            tokens, _ = await complete(engine, make_request(prompt, NUM_TOKENS))
            assert tokens == expected
            num_computed = engine.load().prompt_tokens_computed - before
            assert num_computed <= (len(prompt) if turn == 0 else 5 + engine.info.block_size)
            prompt = [*prompt, *tokens, 5, 6, 7, 8 + turn]


async def test_tenants_share_nothing(llama: Path) -> None:
    async with running_engine(llama) as engine:
        for salt in ("a", "b"):
            await complete(engine, replace(make_request(PROMPTS[3], 2), cache_salt=salt))
        assert engine.load().prompt_tokens_computed == 2 * len(PROMPTS[3])


async def test_a_cached_prompt_is_handed_over_whole(llama: Path) -> None:
    expected = generate(llama, PROMPTS[3:4], NUM_TOKENS)
    async with running_engine(llama, block_size=8) as source, running_engine(llama) as target:
        for _ in range(2):  # the second time prefill finds the prompt in its cache
            sequence = target.submit(make_request(PROMPTS[3], NUM_TOKENS), SubmitMode.HANDOFF)
            moving = asyncio.create_task(hand_over(source, target, sequence))
            tokens = [token.token_id async for event in sequence.events() for token in event.tokens]  # type: ignore[union-attr]
            await moving
            sequence.release()
            assert [tokens] == expected
        assert source.load().prompt_tokens_computed == len(PROMPTS[3]) + 1


async def test_what_decode_has_cached_is_not_handed_over(llama: Path) -> None:
    """A conversation: each prompt is the one before, its reply, and a little more."""
    async with running_engine(llama) as source, running_engine(llama, block_size=8) as target:
        prompt, held = PROMPTS[3], []
        for turn in range(4):
            (expected,) = generate(llama, [prompt], NUM_TOKENS)
            sequence = target.submit(make_request(prompt, NUM_TOKENS), SubmitMode.HANDOFF)
            moving = asyncio.create_task(hand_over(source, target, sequence))
            tokens = [token.token_id async for event in sequence.events() for token in event.tokens]  # type: ignore[union-attr]
            await moving
            held.append(sequence.num_held_tokens)
            sequence.release()
            assert tokens == expected
            prompt = [*prompt, *tokens, 5, 6, 7, 8 + turn]
        assert held[0] == 0
        for before, turn_held in enumerate(held[1:]):
            num_known = len(PROMPTS[3]) + NUM_TOKENS + before * (NUM_TOKENS + 4)
            assert num_known - 9 < turn_held < num_known
        assert target.load().prompt_tokens_computed == 0
        await eventually(lambda: source.load().blocks_used == target.load().blocks_used == 0)


async def test_no_page_may_write_what_others_read(llama: Path) -> None:
    """A worker that lies, or has not heard that decode holds a prefix."""
    async with running_engine(llama, block_size=8) as engine:
        await complete(engine, make_request(PROMPTS[3], 2))
        sequence = engine.submit(make_request(PROMPTS[3], 2), SubmitMode.HANDOFF)
        await sequence.reserved()
        assert sequence.num_held_tokens == len(PROMPTS[3]) - 1
        page = memoryview(bytes(2 * 3 * 1 * 2 * 8 * 4))
        for _ in range(2):
            with pytest.raises(InvalidKvPage, match="imported already"):
                sequence.kv.import_page(PageRange(0, 3, 4, 5), page)
            sequence.kv.reset()
        sequence.kv.import_page(PageRange(0, 3, 32, 33), page)
        assert sequence.kv.is_complete
        sequence.release()


async def test_split_equals_generate(llama: Path) -> None:
    expected = generate(llama, PROMPTS, NUM_TOKENS)
    async with (
        running_engine(llama, prefill_chunk=20, block_size=8) as source,
        running_engine(llama) as target,
    ):

        async def reply(prompt: list[int]) -> list[int]:
            sequence = target.submit(make_request(prompt, NUM_TOKENS), SubmitMode.HANDOFF)
            moving = asyncio.create_task(hand_over(source, target, sequence))
            try:
                return [token.token_id async for event in sequence.events() for token in event.tokens]  # type: ignore[union-attr]
            finally:
                await moving
                sequence.release()

        assert await asyncio.gather(*map(reply, PROMPTS)) == expected
        assert target.load().prompt_tokens_computed == 0
        await eventually(lambda: source.load().blocks_used == target.load().blocks_used == 0)


async def test_a_first_token_that_ends_the_reply_needs_no_join(llama: Path) -> None:
    async with running_engine(llama) as engine:
        sequence = engine.submit(make_request(PROMPTS[1], 1), SubmitMode.HANDOFF)
        moving = asyncio.create_task(hand_over(engine, engine, sequence))
        tokens = [token async for event in sequence.events() for token in event.tokens]  # type: ignore[union-attr]
        await moving
        sequence.release()
        assert len(tokens) == 1
        await eventually(lambda: engine.load().blocks_used == 0)


async def test_a_sequence_that_is_computed_here_takes_no_first_token(llama: Path) -> None:
    async with running_engine(llama) as engine:
        sequence = engine.submit(make_request(PROMPTS[4], NUM_TOKENS), SubmitMode.HANDOFF)
        await sequence.reserved()
        with engine.lock():
            sequence.compute_locally()
            with pytest.raises(ValueError, match="computed here"):
                sequence.accept_first_token(SampledToken(5))
        sequence.release()


async def test_an_incomplete_sequence_cannot_join(llama: Path) -> None:
    async with running_engine(llama) as engine:
        sequence = engine.submit(make_request(PROMPTS[1], 4), SubmitMode.HANDOFF)
        await sequence.reserved()
        with pytest.raises(InvalidKvPage, match="missing"):
            sequence.join()
        zeros = memoryview(bytes(2 * 1 * 3 * 2 * 8 * 4))
        sequence.kv.import_page(PageRange(0, 1, 0, 3), zeros)
        with pytest.raises(InvalidKvPage, match="imported already"):
            sequence.kv.import_page(PageRange(0, 1, 2, 5), zeros)
        with pytest.raises(InvalidKvPage, match="outside"):
            sequence.kv.import_page(PageRange(0, 1, 5, 8), zeros)
        with pytest.raises(InvalidKvPage, match="bytes"):
            sequence.kv.import_page(PageRange(1, 2, 0, 2), zeros)
        with pytest.raises(InvalidKvPage, match="NaN"):
            sequence.kv.import_page(PageRange(1, 2, 0, 3), memoryview(b"\xff" * len(zeros)))
        huge = torch.full((len(zeros) // 4,), 3e38)  # padding of others would read it: 3e38 x query - inf
        with pytest.raises(InvalidKvPage, match="beyond"):
            sequence.kv.import_page(PageRange(1, 2, 0, 3), memoryview(huge.numpy().tobytes()))
        with pytest.raises(InvalidKvPage, match="none of the model's"):
            sequence.accept_first_token(SampledToken(4_000_000_000))
        sequence.release()
        with pytest.raises(SequenceReleased):
            sequence.kv.import_page(PageRange(1, 2, 0, 3), zeros)


async def test_releasing_in_mid_reply_frees_the_blocks_and_ends_the_events(llama: Path) -> None:
    async with running_engine(llama) as engine:
        sequence = engine.submit(make_request(PROMPTS[1], 400), SubmitMode.LOCAL)
        with pytest.raises(SequenceReleased):  # noqa: PT012 - the release is what makes it raise
            async for _ in sequence.events():
                sequence.release()
                sequence.release()
        await eventually(lambda: engine.load().blocks_used == 0)


async def test_a_closed_engine_leaves_nobody_waiting(llama: Path) -> None:
    async with running_engine(llama) as engine:
        running = engine.submit(make_request(PROMPTS[1], 400), SubmitMode.LOCAL)
        reserved = engine.submit(make_request(PROMPTS[1], 400), SubmitMode.HANDOFF)
    with pytest.raises(EngineStopped):
        async for _ in running.events():
            pass
    with pytest.raises(EngineStopped):
        async for _ in reserved.events():
            pass
    with pytest.raises(EngineStopped):
        engine.submit(make_request(PROMPTS[1], 4), SubmitMode.LOCAL)


async def test_stop_strings_and_stop_tokens_end_a_reply(llama: Path) -> None:
    async with running_engine(llama) as engine:
        tokens, text = await complete(engine, make_request(PROMPTS[3], NUM_TOKENS))
        stop = text[len(text) // 2 :][:3]
        _, stopped = await complete(engine, make_request(PROMPTS[3], NUM_TOKENS, min_tokens=0, stop=(stop,)))
        assert stopped == text.partition(stop)[0]
        cut, _ = await complete(
            engine, make_request(PROMPTS[3], NUM_TOKENS, min_tokens=0, stop_token_ids=(tokens[5],))
        )
        assert cut == tokens[: tokens.index(tokens[5]) + 1]


class _Broken(HfEngine):
    """Fails outside the forward pass, as only a fault of its own could make it."""

    def _take_in(self, *step: object) -> NoReturn:
        raise RuntimeError("scripted")


async def test_an_engine_whose_thread_dies_leaves_nobody_waiting(llama: Path) -> None:
    engine = _Broken(EngineConfig(model=llama, model_name="tiny"))
    await engine.start()
    sequence = engine.submit(make_request(PROMPTS[1], 4), SubmitMode.LOCAL)
    async with asyncio.timeout(10):
        await engine.failed()
    with pytest.raises(EngineStopped):
        await anext(sequence.events())
    with pytest.raises(EngineStopped):
        engine.submit(make_request(PROMPTS[1], 4), SubmitMode.LOCAL)


class _Spoiled(ModelRunner):
    """Computes NaN for the sequences of some prompts, as soon as they reach a position."""

    victims: ClassVar[set[tuple[int, ...]]] = set()
    from_position: ClassVar[int] = 0

    @torch.inference_mode()
    def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
        logits = super().forward(chunks, on_layer)
        sampling = iter(logits)
        assert self._cache is not None
        for chunk in chunks:
            row = next(sampling) if chunk.samples else None
            if chunk.sequence.request.prompt_token_ids not in self.victims or chunk.end <= self.from_position:
                continue
            for layer in self._cache.layers:
                slots = self._cache.slots(chunk.sequence.block_table, self.from_position, chunk.end)
                layer.keys[slots] = layer.values[slots] = torch.nan
            if row is not None:
                row.fill_(torch.nan)
        return logits


SPOILED = [[(7 * i + 13 * n) % 900 + 3 for i in range(21)] for n in range(4)]


@pytest.fixture
def spoil() -> Iterator[Callable[[list[int], int], None]]:
    def spoil(victim: list[int], from_position: int) -> None:
        _Spoiled.victims, _Spoiled.from_position = {tuple(victim)}, from_position

    yield spoil
    _Spoiled.victims = set()


async def test_nan_fails_one_sequence_and_reaches_nobody_else(
    llama: Path, spoil: Callable[[list[int], int], None]
) -> None:
    """Its blocks go to others afterwards."""
    expected = generate(llama, SPOILED, NUM_TOKENS)
    spoil(SPOILED[0], 30)
    config = {"block_size": 4, "kv_memory_bytes": 44 * BLOCK_BYTES, "runner_type": _Spoiled}
    async with running_engine(llama, **config) as engine:
        replies = [complete(engine, make_request(prompt, NUM_TOKENS)) for prompt in SPOILED]
        failure, *completed = await asyncio.gather(*replies, return_exceptions=True)
        assert isinstance(failure, NoTokenToChoose)
        assert [reply[0] for reply in completed] == expected[1:]  # type: ignore[index]
        assert engine.load().blocks_used == 0
        _Spoiled.victims = set()
        again = await asyncio.gather(*(complete(engine, make_request(p, NUM_TOKENS)) for p in SPOILED))
        assert [tokens for tokens, _ in again] == expected


@pytest.mark.parametrize("num_chunks", [1, 2])
async def test_nan_of_a_sequence_that_leaves_before_it_samples_reaches_nobody(
    llama: Path, num_chunks: int, spoil: Callable[[list[int], int], None]
) -> None:
    expected = generate(llama, SPOILED[1:], NUM_TOKENS)
    spoil(SPOILED[0], 2)
    config = {"block_size": 4, "kv_memory_bytes": 20 * BLOCK_BYTES, "runner_type": _Spoiled}
    async with running_engine(llama, prefill_chunk=9, **config) as engine:
        leaving = engine.submit(make_request(SPOILED[0], NUM_TOKENS), SubmitMode.PREFILL_ONLY)
        events = leaving.events()
        for _ in range(num_chunks):
            await anext(events)
        leaving.release()
        for prompt, tokens in zip(SPOILED[1:], expected, strict=True):
            assert (await complete(engine, make_request(prompt, NUM_TOKENS)))[0] == tokens


async def test_nothing_but_nan_ends_the_engine(llama: Path, spoil: Callable[[list[int], int], None]) -> None:
    """Its weights may be damaged: it must not fail request after request as the quickest worker of all."""
    spoil(PROMPTS[1], 0)
    async with running_engine(llama, runner_type=_Spoiled, prefill_chunk=4) as engine:
        for _ in range(2):
            with pytest.raises(NoTokenToChoose):
                await complete(engine, make_request(PROMPTS[1], 4))
        assert engine.load().blocks_used == 0
        with pytest.raises((NoTokenToChoose, EngineStopped)):
            await complete(engine, make_request(PROMPTS[1], 4))
        await asyncio.wait_for(engine.failed(), 10)


IN_ONE_CHUNK_OR_MANY: list[dict[str, int]] = [{}, {"prefill_chunk": 4, "block_size": 4}]


@pytest.mark.parametrize("mode", [SubmitMode.LOCAL, SubmitMode.PREFILL_ONLY])
@pytest.mark.parametrize("config", IN_ONE_CHUNK_OR_MANY)
async def test_choices_of_one_request_whose_logits_are_nan_do_not_end_the_engine(
    llama: Path, spoil: Callable[[list[int], int], None], config: dict[str, int], mode: SubmitMode
) -> None:
    spoil(PROMPTS[4], 0)
    async with running_engine(llama, runner_type=_Spoiled, **config) as engine:
        failures = await asyncio.gather(*_choices(engine, PROMPTS[4], mode), return_exceptions=True)
        assert [type(failure) for failure in failures] == [NoTokenToChoose] * 5
        assert len((await complete(engine, make_request(PROMPTS[1], 4)))[0]) == 4
        assert engine.load().blocks_used == 0


class _Raising(ModelRunner):
    """Cannot compute the last token of one prompt."""

    def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
        prompts = [chunk.sequence.request.prompt_token_ids for chunk in chunks if chunk.samples]
        if tuple(PROMPTS[4]) in prompts:
            raise RuntimeError("scripted")
        return super().forward(chunks, on_layer)


@pytest.mark.parametrize("mode", [SubmitMode.LOCAL, SubmitMode.PREFILL_ONLY])
@pytest.mark.parametrize("config", IN_ONE_CHUNK_OR_MANY)
async def test_choices_of_one_request_that_cannot_be_computed_do_not_end_the_engine(
    llama: Path, config: dict[str, int], mode: SubmitMode
) -> None:
    async with running_engine(llama, runner_type=_Raising, **config) as engine:
        failures = await asyncio.gather(*_choices(engine, PROMPTS[4], mode), return_exceptions=True)
        assert [type(failure) for failure in failures] == [EngineStopped] * 5
        assert len((await complete(engine, make_request(PROMPTS[1], 4)))[0]) == 4
        assert engine.load().blocks_used == 0


def _choices(engine: HfEngine, prompt: list[int], mode: SubmitMode) -> list[Awaitable[None]]:
    """Five of one prompt, all submitted before the first step; to be read to their ends."""

    async def drain(sequence: EngineSequence) -> None:
        try:
            async for _ in sequence.events():
                pass
        finally:
            sequence.release()

    with engine.lock():
        requests = [replace(make_request(prompt, 4), choice_index=choice) for choice in range(5)]
        return [drain(engine.submit(request, mode)) for request in requests]


@pytest.mark.parametrize("config", [{}, {"prefill_chunk": 70}], ids=["still waiting", "let in meanwhile"])
async def test_who_shares_only_the_beginning_with_a_sequence_that_fails_goes_on(
    llama: Path, spoil: Callable[[list[int], int], None], config: dict[str, int]
) -> None:
    prompt, other = PROMPTS[4], [*PROMPTS[4][:40], 5, 6, 7]
    (expected,) = generate(llama, [other], NUM_TOKENS)
    spoil(prompt, 60)
    async with running_engine(llama, runner_type=_Spoiled, block_size=8, **config) as engine:
        with engine.lock():  # both come before the first step
            replies = [
                engine.submit(make_request(each, NUM_TOKENS), SubmitMode.LOCAL) for each in (prompt, other)
            ]
        with pytest.raises(NoTokenToChoose):
            await read_out(replies[0])
        assert (await read_out(replies[1]))[0] == expected


async def test_requests_that_bar_what_the_model_leaves_end_nothing_but_themselves(llama: Path) -> None:
    """Three on an idle worker: each step's only outcome is that there is no token."""
    async with running_engine(llama, runner_type=_OnlyOneToken) as engine:
        for _ in range(4):
            with pytest.raises(InvalidRequest, match="request bars every token"):
                await complete(engine, make_request(PROMPTS[1], 4, stop_token_ids=(5,), ignore_eos=True))
        assert (await complete(engine, make_request(PROMPTS[1], 4)))[0] == [5] * 4


async def test_pages_that_wait_when_their_request_is_refused_are_refused_for_the_same_reason(
    llama: Path,
) -> None:
    """Not as if the worker had failed, which would count against it."""
    async with running_engine(llama, runner_type=_OnlyOneToken) as engine:
        request = make_request(PROMPTS[1], 4, stop_token_ids=(5,), ignore_eos=True)
        sequence = engine.submit(request, SubmitMode.PREFILL_ONLY)
        with pytest.raises(InvalidRequest):
            async for _ in sequence.events():
                pass
        with pytest.raises(InvalidRequest):
            sequence.kv.export_page(PageRange(0, 1, 0, 1))
        with pytest.raises(InvalidRequest):
            sequence.kv.view_page(PageRange(0, 1, 0, 1))
        sequence.release()


class _OnlyOneToken(ModelRunner):
    """Gives every token but one no chance."""

    @torch.inference_mode()
    def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
        logits = torch.full_like(super().forward(chunks, on_layer), -torch.inf)
        logits[:, 5] = 1.0
        return logits


class _OnlyOneTokenOrNone(_OnlyOneToken):
    """And gives one prompt none at all."""

    @torch.inference_mode()
    def forward(self, chunks: Sequence[ScheduledChunk], on_layer: OnLayer | None = None) -> torch.Tensor:
        logits = super().forward(chunks, on_layer)
        sampling = [chunk for chunk in chunks if chunk.samples]
        for row, chunk in zip(logits, sampling, strict=True):
            if chunk.sequence.request.prompt_token_ids == tuple(PROMPTS[2]):
                row.fill_(torch.nan)
        return logits


async def test_a_step_may_fail_one_for_its_logits_and_another_for_its_request(llama: Path) -> None:
    requests = [
        make_request(PROMPTS[2], 4),
        make_request(PROMPTS[1], 4, stop_token_ids=(5,), ignore_eos=True),
        make_request(PROMPTS[3], 4),
    ]
    async with running_engine(llama, runner_type=_OnlyOneTokenOrNone) as engine:
        with engine.lock():  # all of them come before the first step
            sequences = [engine.submit(request, SubmitMode.LOCAL) for request in requests]
        replies = await asyncio.gather(*map(read_out, sequences), return_exceptions=True)
        assert [type(failure) for failure in replies[:2]] == [NoTokenToChoose, InvalidRequest]
        assert replies[2][0] == [5] * 4  # type: ignore[index]


async def test_a_small_pool_bounds_the_context_that_is_offered(llama: Path) -> None:
    block_bytes = 2 * 3 * 2 * 8 * 4 * 16
    async with running_engine(llama, kv_memory_bytes=3 * block_bytes) as engine:
        assert engine.info.max_model_len == 48
        tokens, _ = await complete(engine, make_request(PROMPTS[1], 10_000, min_tokens=0, ignore_eos=True))
        assert len(PROMPTS[1]) + len(tokens) == 48
