"""Hundreds of requests of all sorts through a pool too small for them: replies as if each were alone."""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from services.engine.errors import SequenceReleased
from services.engine.loop import HfEngine
from services.engine.request import (
    EngineRequest,
    FinishReason,
    SequenceFinished,
    SubmitMode,
    TextGenerated,
)
from services.engine.sequence import EngineSequence
from tests.unit.engine.tiny_models import hand_over, make_request, running_engine, save_model
from tests.waiting import eventually

LONGEST_PROMPT, MOST_TOKENS, MOST_CHOICES = 60, 30, 4
BLOCK = 4
BLOCK_BYTES = 2 * 3 * 2 * 8 * 4 * BLOCK  # keys and values, layers, heads, head size, fp32
POOL = {"block_size": BLOCK, "kv_memory_bytes": 60 * BLOCK_BYTES}  # two or three of the longest
AT_ONCE = 20
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1.3, "top_k": 40, "repetition_penalty": 1.2},
)


@dataclass
class Reply:
    """What one request led to so far; `reason` is None for one that was released."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None

    def add(self, event: TextGenerated | SequenceFinished) -> None:
        self.token_ids += [token.token_id for token in event.tokens]
        if isinstance(event, TextGenerated):
            self.text += event.text
        else:
            self.reason = event.reason


@dataclass(frozen=True)
class Job:
    """One request and its fate.

    Attributes:
        patience: events of whatever sequence after which it is released, unless it has ended.
    """

    request: EngineRequest
    mode: SubmitMode
    patience: int | None


def make_jobs(count: int, seed: int) -> list[list[Job]]:
    """`count` requests, those for several choices of one prompt together."""
    rng = random.Random(seed)
    beginning = [rng.randrange(3, 900) for _ in range(LONGEST_PROMPT)]
    jobs: list[list[Job]] = []
    while (left := count - sum(map(len, jobs))) > 0:
        length = rng.randint(1, LONGEST_PROMPT)
        shared = rng.choice([0, 0, length // 2])
        prompt = [*beginning[:shared], *(rng.randrange(3, 900) for _ in range(length - shared))]
        sampling = rng.choice(SAMPLINGS) | {"seed": rng.randrange(100), "min_tokens": rng.choice([0, 0, 5])}
        if rng.random() < 0.3:
            sampling |= {"stop": ("ba", rng.choice(["e", "run", "ow"])), "include_stop": rng.random() < 0.5}
        if rng.random() < 0.2:
            sampling |= {"stop_token_ids": tuple(rng.randrange(3, 900) for _ in range(40))}
        request = make_request(prompt, rng.randint(1, MOST_TOKENS), **sampling)
        request = replace(request, priority=rng.choice([0, 0, 1, 2]))
        num_choices = rng.choice([1, 1, 1, 2, MOST_CHOICES]) if "temperature" in sampling else 1
        jobs.append(
            [
                Job(
                    replace(request, choice_index=choice),
                    rng.choice([SubmitMode.LOCAL, SubmitMode.LOCAL, SubmitMode.HANDOFF]),
                    rng.randint(0, 150) if rng.random() < 0.2 else None,
                )
                for choice in range(min(num_choices, left))
            ]
        )
    return jobs


class Soak:
    """Runs jobs on a decode engine, with a prefill engine beside it."""

    def __init__(self, source: HfEngine, target: HfEngine) -> None:
        self._source = source
        self._target = target
        self._num_events = 0
        self._impatient: list[tuple[int, EngineSequence]] = []

    async def run(self, jobs: Sequence[Sequence[Job]]) -> list[tuple[Job, Reply]]:
        """Some at a time: a task takes the next jobs when its own have ended."""
        waiting = deque(jobs)
        done: list[tuple[Job, Reply]] = []

        async def work() -> None:
            while waiting:
                together = waiting.popleft()
                replies = await asyncio.gather(*map(self._serve, together))
                done.extend(zip(together, replies, strict=True))

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())
        return done

    async def _serve(self, job: Job) -> Reply:
        sequence = self._target.submit(job.request, job.mode)
        if job.patience is not None:
            self._impatient.append((self._num_events + job.patience, sequence))
        reply = Reply()
        expected = () if job.patience is None else (SequenceReleased,)
        try:
            async with asyncio.TaskGroup() as group:
                if job.mode is SubmitMode.HANDOFF:
                    group.create_task(self._move(sequence, expected))
                with suppress(*expected):
                    async for event in sequence.events():
                        assert isinstance(event, TextGenerated | SequenceFinished)
                        reply.add(event)
                        self._count_event()
        finally:
            sequence.release()
        return reply

    async def _move(self, sequence: EngineSequence, expected: tuple[type[Exception], ...]) -> None:
        with suppress(*expected):
            await hand_over(self._source, self._target, sequence)

    def _count_event(self) -> None:
        """Releases those whose patience is at an end: queued, reserved, computing or ended."""
        self._num_events += 1
        for due, sequence in tuple(self._impatient):
            if due <= self._num_events:
                self._impatient.remove((due, sequence))
                sequence.release()


async def reply_alone(engine: HfEngine, request: EngineRequest) -> Reply:
    sequence = engine.submit(request, SubmitMode.LOCAL)
    reply = Reply()
    async for event in sequence.events():
        assert isinstance(event, TextGenerated | SequenceFinished)
        reply.add(event)
    sequence.release()
    return reply


@pytest.mark.parametrize(
    "count",
    [60, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(240)])],
)
async def test_every_reply_is_as_if_alone_and_no_block_is_lost(tmp_path: Path, count: int) -> None:
    folder = save_model(tmp_path)
    jobs = make_jobs(count, seed=count)
    limits = {"max_queue_len": count, "prefill_chunk": 24, "max_batched_tokens": 48}
    async with (
        running_engine(folder, **limits, block_size=16) as source,
        running_engine(folder, **limits, **POOL) as target,
    ):
        done = await Soak(source, target).run(jobs)
        await eventually(lambda: source.load().blocks_used == target.load().blocks_used == 0)
        assert target.load().running == target.load().waiting == 0
        assert target.load().tokens_recomputed > 0, "the pool was large enough for all"
    assert len(done) == count
    async with running_engine(folder, prefix_cache=False) as fresh:
        for job, reply in done:
            alone = await reply_alone(fresh, job.request)
            if reply.reason is None:
                assert job.patience is not None
                assert alone.token_ids[: len(reply.token_ids)] == reply.token_ids
                assert alone.text.startswith(reply.text)
            else:
                assert reply == alone
    ended = [reply.reason for _, reply in done]
    assert {None, FinishReason.STOP, FinishReason.LENGTH} == {*ended}
    assert ended.count(None) < count / 4
