"""A continuation from any cut gives what the undisturbed run gave from there on: tokens, text, ending."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.engine.loop import HfEngine
from services.engine.request import (
    FinishReason,
    SequenceFinished,
    SubmitMode,
    TextGenerated,
)
from tests.unit.engine.tiny_models import make_request, running_engine, save_model

NUM_TOKENS = 24
PROMPT = [(11 * i + 80) % 900 + 3 for i in range(16)]
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 9}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED,
    "top-p and penalties": SEEDED | {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "top-k and repetition": SEEDED | {"top_k": 30, "repetition_penalty": 1.3},
    "min-p": SEEDED | {"min_p": 0.05, "temperature": 1.2},
    "greedy penalties": {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "logit bias": SEEDED | {"logit_bias": ((70, 4.0), (300, 3.5), (512, -100.0))},
    "logprobs": SEEDED | {"logprobs": 3},
    # A bias towards the end: below min_tokens it must not come, above it comes at once.
    "min tokens": SEEDED | {"logit_bias": ((1, 100.0),), "min_tokens": 10},
}


@dataclass(frozen=True)
class Run:
    """What one request led to. Deltas are of the events, in order."""

    deltas: tuple[TextGenerated, ...]
    finished: SequenceFinished

    @property
    def token_ids(self) -> list[int]:
        events = (*self.deltas, self.finished)
        return [token.token_id for event in events for token in event.tokens]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


async def run(engine: HfEngine, sampling: dict[str, Any], generated: tuple[int, ...] = ()) -> Run:
    options = {"min_tokens": 0, **sampling}
    request = make_request(PROMPT, NUM_TOKENS, generated_token_ids=generated, **options)
    sequence = engine.submit(request, SubmitMode.LOCAL)
    try:
        *deltas, finished = [event async for event in sequence.events()]
    finally:
        sequence.release()
    assert isinstance(finished, SequenceFinished)
    return Run(tuple(delta for delta in deltas if isinstance(delta, TextGenerated)), finished)


async def check_every_cut(engine: HfEngine, sampling: dict[str, Any]) -> Run:
    """Cuts behind every delta, where a log may end, and for tokens and ending also behind every token."""
    whole = await run(engine, sampling)
    end = whole.finished
    for number in range(1, len(whole.deltas) + 1):
        sent = tuple(token.token_id for delta in whole.deltas[:number] for token in delta.tokens)
        rest = await run(engine, sampling, sent)
        assert (*whole.deltas[:number], *rest.deltas) == whole.deltas, f"cut behind delta {number}"
        assert rest.finished.tokens == end.tokens
    if "stop" not in sampling:  # where a stop string began, only a cut that a log can have tells
        for cut in range(1, len(whole.token_ids) + 1):
            sent = tuple(whole.token_ids[:cut])
            rest = await run(engine, sampling, sent)
            assert [*sent, *rest.token_ids] == whole.token_ids, f"cut behind token {cut}"
            assert rest.finished.reason is end.reason
            assert rest.finished.num_generated_tokens == end.num_generated_tokens
            assert rest.finished.num_prompt_tokens == end.num_prompt_tokens == len(PROMPT)
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[HfEngine]:
    async with running_engine(folder) as engine:
        yield engine
        assert engine.load().blocks_used == 0


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_every_cut_gives_the_rest(engine: HfEngine, sampling: dict[str, Any]) -> None:
    whole = await check_every_cut(engine, sampling)
    at_least = sampling.get("min_tokens", 0)
    assert whole.finished.num_generated_tokens > at_least
    if at_least:
        assert whole.finished.reason is FinishReason.STOP
        assert whole.finished.num_generated_tokens == at_least + 1
    else:
        assert len(set(whole.token_ids)) > 8, "a reply that repeats itself shows little"


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("changes", [{}, {"include_stop": True}, {"min_tokens": 12}], ids=str)
async def test_every_cut_stops_at_the_same_string(
    engine: HfEngine, sampling: dict[str, Any], changes: dict[str, Any]
) -> None:
    """The string begins in the middle of one token and ends in the middle of another."""
    plain = await run(engine, sampling | changes)  # min_tokens bars ends, which may change any token
    stop = next(
        text[1:-1]
        for first, second in zip(plain.deltas[7:], plain.deltas[8:], strict=False)
        if len(text := first.text + second.text) > 3 and len(first.text) > 1 and len(second.text) > 1
    )
    options = sampling | {"stop": (stop, stop + "?", "no such string")} | changes
    whole = await check_every_cut(engine, options)
    if "min_tokens" in changes:
        assert whole.finished.num_generated_tokens >= changes["min_tokens"]
    else:
        before, _, _ = plain.text.partition(stop)
        assert whole.text == before + (stop if "include_stop" in changes else "")
        assert whole.finished.reason is FinishReason.STOP
    assert whole.token_ids == plain.token_ids[: len(whole.token_ids)]


@pytest.mark.parametrize("place", [0, 1, 11])
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
async def test_every_cut_stops_at_the_same_token(
    engine: HfEngine, sampling: dict[str, Any], place: int
) -> None:
    plain = await run(engine, sampling)
    stop_token = plain.token_ids[place]
    whole = await check_every_cut(engine, sampling | {"stop_token_ids": (stop_token,)})
    assert whole.token_ids == plain.token_ids[: plain.token_ids.index(stop_token) + 1]
    assert whole.finished.reason is FinishReason.STOP
    assert whole.finished.tokens[-1].token_id == stop_token
