"""The simulated engine: replies depend on requests alone, blocks and pages are real."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from services.engine.config import EngineConfig
from services.engine.errors import InvalidKvPage, UnsupportedModel
from services.engine.page_range import PageRange
from services.engine.request import FirstTokenSampled, KvComputed, SampledToken, SubmitMode
from services.engine.sequence_state import SequenceState
from services.engine.sim import REPLY_LENGTH, SimEngine
from services.engine.sim_model import REPLY_TEXT, write_sim_model
from tests.unit.engine.tiny_models import complete, end_in_order_of_arrival, make_request
from tests.waiting import eventually

PROMPT = list(range(40))


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SimEngine]:
    write_sim_model(tmp_path)
    engine = SimEngine(EngineConfig(model=tmp_path, model_name="sim", sim_token_ms=0.2, sim_jitter_ms=0.1))
    await engine.start()
    yield engine
    assert engine.load().blocks_used == 0
    await engine.close()


async def test_the_default_reply_is_the_fixed_text_of_120_tokens(engine: SimEngine) -> None:
    tokens, text = await complete(engine, make_request(PROMPT, 500, min_tokens=0))
    assert len(tokens) == REPLY_LENGTH == 120
    assert REPLY_TEXT.startswith(text)
    assert len(text) > 300


async def test_a_seeded_reply_is_a_function_of_seed_and_position(engine: SimEngine) -> None:
    options = {"temperature": 1.0, "min_tokens": 0}
    one, two, other = await asyncio.gather(
        *(complete(engine, make_request(PROMPT, 30, seed=seed, **options)) for seed in (1, 1, 2))
    )
    assert one == two != other
    for cut in (1, 13, 29):
        request = make_request(PROMPT, 30, seed=1, generated_token_ids=one[0][:cut], **options)
        assert one[0][:cut] + (await complete(engine, request))[0] == one[0]


async def test_ignore_eos_goes_on(engine: SimEngine) -> None:
    tokens, _ = await complete(engine, make_request(PROMPT, 300, min_tokens=0, ignore_eos=True))
    assert len(tokens) == 300


async def test_pages_in_the_wrong_place_are_noticed(engine: SimEngine) -> None:
    source = engine.submit(make_request(PROMPT, 5), SubmitMode.PREFILL_ONLY)
    target = engine.submit(make_request(list(reversed(PROMPT)), 5), SubmitMode.HANDOFF)
    await target.reserved()
    async for event in source.events():
        if isinstance(event, KvComputed):
            where = PageRange(0, 2, event.token_start, event.token_end)
            target.kv.import_page(where, memoryview(source.kv.export_page(where).numpy().tobytes()))
        if isinstance(event, FirstTokenSampled):
            target.accept_first_token(event.token)
    with pytest.raises(InvalidKvPage, match="not this prompt's"):
        target.join()
    source.release()
    target.release()


async def test_a_first_token_that_ends_the_reply_while_a_page_is_checked_makes_it_no_bad_page(
    engine: SimEngine,
) -> None:
    """The blocks are somebody else's by then; what they hold says nothing of whoever sent the page."""
    source = engine.submit(make_request(PROMPT, 1), SubmitMode.PREFILL_ONLY)
    target = engine.submit(make_request(PROMPT, 1), SubmitMode.HANDOFF)
    await target.reserved()
    async for _ in source.events():
        pass
    where = PageRange(0, 2, target.num_held_tokens, len(PROMPT))
    view = source.kv.view_page(where)

    def check(pieces: Iterable[memoryview]) -> None:
        assert b"".join(pieces) == b"".join(view.pieces)
        target.accept_first_token(SampledToken(70))
        raise InvalidKvPage("overwritten meanwhile")

    target.kv.copy_page(where, engine.cache.rows, view.blocks, check)
    assert target.kv.is_complete
    source.release()
    target.release()


async def test_a_page_that_is_refused_after_it_was_copied_is_copied_again(engine: SimEngine) -> None:
    source = engine.submit(make_request(PROMPT, 5), SubmitMode.PREFILL_ONLY)
    target = engine.submit(make_request(PROMPT, 5), SubmitMode.HANDOFF)
    await target.reserved()
    async for _ in source.events():
        pass
    where = PageRange(0, 2, target.num_held_tokens, len(PROMPT))

    def refuse(pieces: Iterable[memoryview]) -> None:
        raise InvalidKvPage("scripted")

    blocks = source.kv.view_page(where).blocks
    with pytest.raises(InvalidKvPage, match="scripted"):
        target.kv.copy_page(where, engine.cache.rows, blocks, refuse)
    assert not target.kv.is_complete
    target.kv.copy_page(where, engine.cache.rows, blocks, lambda pieces: None)
    with pytest.raises(InvalidKvPage, match="imported already"):
        target.kv.copy_page(where, engine.cache.rows, blocks, lambda pieces: None)
    target.accept_first_token(SampledToken(70))
    target.join()
    source.release()
    target.release()


async def test_a_join_makes_room_for_the_next_reservation(tmp_path: Path) -> None:
    write_sim_model(tmp_path)
    config = EngineConfig(
        model=tmp_path, model_name="sim", kv_memory_bytes=16 * 16 * 128, sim_token_ms=60_000, sim_jitter_ms=0
    )
    engine = SimEngine(config)
    await engine.start()
    source = engine.submit(make_request(range(64), 5), SubmitMode.PREFILL_ONLY)
    first, second = (engine.submit(make_request(range(64), 50), SubmitMode.HANDOFF) for _ in range(2))
    await first.reserved()
    assert second.state is SequenceState.WAITING, "both fit into half the pool"
    await anext(source.events())
    where = PageRange(0, 2, 0, 64)
    first.kv.import_page(where, memoryview(source.kv.export_page(where).numpy().tobytes()))
    first.accept_first_token(SampledToken(70))
    first.join()
    async with asyncio.timeout(5):
        await second.reserved()
    await engine.close()


async def test_who_gave_way_to_a_reservation_ends_before_it(engine: SimEngine, tmp_path: Path) -> None:
    config = EngineConfig(
        model=tmp_path, model_name="sim", block_size=4, kv_memory_bytes=8 * 4 * 128, sim_token_ms=0.2
    )
    small = SimEngine(config)
    await small.start()
    replies = await end_in_order_of_arrival(small, engine)
    assert [len(tokens) for tokens in replies] == [24, 12]
    await small.close()


async def test_choices_start_together_once_one_has_computed_their_prompt(tmp_path: Path) -> None:
    write_sim_model(tmp_path)
    engine = SimEngine(
        EngineConfig(model=tmp_path, model_name="sim", sim_token_ms=60_000, sim_prefill_ms_per_token=0.01)
    )
    await engine.start()
    choices = [engine.submit(make_request(range(100), 50), SubmitMode.LOCAL) for _ in range(3)]
    await eventually(lambda: engine.load().running == len(choices))
    assert engine.load().waiting == 0
    for choice in choices:
        choice.release()
    assert engine.load().blocks_used == 0
    await engine.close()


async def test_a_folder_without_the_shape_of_a_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    with pytest.raises(UnsupportedModel, match="head_dim"):
        SimEngine(EngineConfig(model=tmp_path, model_name="sim"))
