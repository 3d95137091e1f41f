"""Scheduling decisions as a table: who comes when, and what every step runs. Blocks hold 4 tokens."""

from dataclasses import dataclass, field

import pytest

from services.engine.page_range import PageRange
from services.engine.request import SampledToken, SubmitMode
from services.engine.sequence import EngineSequence
from services.engine.sequence_state import SequenceState
from tests.unit.engine.scheduling import Bench

LOCAL, HANDOFF, PREFILL_ONLY = SubmitMode.LOCAL, SubmitMode.HANDOFF, SubmitMode.PREFILL_ONLY

Step = list[tuple[str, int, int]]  # request, first and last position + 1


@dataclass(frozen=True)
class Comes:
    """A request, numbered from 1 in the order of the table."""

    num_tokens: int
    before_step: int = 0
    mode: SubmitMode = LOCAL
    priority: int = 0
    max_tokens: int = 2
    joins_before_step: int | None = None  # HANDOFF: its KV cache has arrived


@dataclass(frozen=True)
class Case:
    name: str
    requests: list[Comes]
    steps: list[Step]
    num_blocks: int = 16
    limits: dict[str, int] = field(default_factory=dict)


CASES = [
    Case(
        "a prompt runs in chunks, then one token a step",
        [Comes(11, max_tokens=3)],
        [[("1", 0, 8)], [("1", 8, 11)], [("1", 11, 12)], [("1", 12, 13)], []],
    ),
    Case(
        "decoding goes before prompts and is never held up by them",
        [Comes(3, max_tokens=4), Comes(16, before_step=1)],
        [
            [("1", 0, 3)],
            [("1", 3, 4), ("2", 0, 5)],
            [("1", 4, 5), ("2", 5, 10)],
            [("1", 5, 6), ("2", 10, 15)],
            [("2", 15, 16)],
            [("2", 16, 17)],
        ],
        limits={"max_batched_tokens": 6},
    ),
    Case(
        "two prompts share a step's budget in order",
        [Comes(5, max_tokens=1), Comes(9, max_tokens=1)],
        [[("1", 0, 5), ("2", 0, 5)], [("2", 5, 9)]],
        limits={"max_batched_tokens": 10},
    ),
    Case(
        "higher priority goes first, then whoever came first",
        [Comes(4, max_tokens=1), Comes(4, max_tokens=1), Comes(4, priority=2, max_tokens=1)],
        [[("3", 0, 4)], [("1", 0, 4)], [("2", 0, 4)]],
        limits={"max_num_seqs": 1},
    ),
    Case(
        "a sequence that waits for its KV cache takes no part until it joins, then decodes at once",
        [Comes(6, mode=HANDOFF, joins_before_step=2, max_tokens=3), Comes(4, max_tokens=4)],
        [[("2", 0, 4)], [("2", 4, 5)], [("1", 6, 7), ("2", 5, 6)], [("1", 7, 8), ("2", 6, 7)], []],
    ),
    Case(
        "a prefill worker samples once and keeps the blocks, and others run on",
        [Comes(10, mode=PREFILL_ONLY), Comes(4, mode=PREFILL_ONLY)],
        [[("1", 0, 8), ("2", 0, 4)], [("1", 8, 10)], []],
    ),
    Case(
        "who does not fit waits, and those behind it too: first come, first served",
        [Comes(12, max_tokens=4), Comes(12, max_tokens=1), Comes(2, max_tokens=1)],
        [
            [("1", 0, 8)],
            [("1", 8, 12)],
            [("1", 12, 13)],
            [("1", 13, 14)],
            [("1", 14, 15)],
            [("2", 0, 8), ("3", 0, 2)],
            [("2", 8, 12)],
        ],
        num_blocks=5,
    ),
    Case(
        "when the pool is full the last one gives way and is computed again, what it said included",
        [Comes(4, max_tokens=7), Comes(4, max_tokens=8)],
        [
            [("1", 0, 4), ("2", 0, 4)],
            [("1", 4, 5), ("2", 4, 5)],
            [("1", 5, 6), ("2", 5, 6)],
            [("1", 6, 7), ("2", 6, 7)],
            [("1", 7, 8), ("2", 7, 8)],
            [("1", 8, 9)],
            [("1", 9, 10)],
            [("2", 4, 9)],  # its first block was still there
            [("2", 9, 10)],
            [("2", 10, 11)],
            [],
        ],
        num_blocks=4,
    ),
    Case(
        "a preempted sequence comes back before those that came later",
        [Comes(4, max_tokens=7), Comes(4, max_tokens=6), Comes(2, before_step=5, max_tokens=1)],
        [
            [("1", 0, 4), ("2", 0, 4)],
            [("1", 4, 5), ("2", 4, 5)],
            [("1", 5, 6), ("2", 5, 6)],
            [("1", 6, 7), ("2", 6, 7)],
            [("1", 7, 8), ("2", 7, 8)],
            [("1", 8, 9)],
            [("1", 9, 10)],
            [("2", 4, 9), ("3", 0, 2)],
        ],
        num_blocks=4,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decisions(case: Case) -> None:
    bench = Bench(num_blocks=case.num_blocks, **case.limits)
    sequences = {}
    seen: list[Step] = []
    for number in range(len(case.steps)):
        for index, comes in enumerate(case.requests):
            if comes.before_step == number:
                sequences[index] = bench.add(
                    comes.num_tokens, comes.mode, comes.priority, max_tokens=comes.max_tokens
                )
            if comes.joins_before_step == number:
                _hand_over(bench, sequences[index])
        seen.append(bench.step())
    assert seen == case.steps


def _hand_over(bench: Bench, sequence: EngineSequence) -> None:
    """As if every page had arrived, and the first token before them."""
    assert sequence.state is SequenceState.RESERVED
    num_bytes = bench.cache.layout.bytes_per_token * sequence.num_tokens
    sequence.kv.import_page(PageRange(0, 1, 0, sequence.num_tokens), memoryview(bytes(num_bytes)))
    sequence.accept_first_token(SampledToken(70))
    sequence.join()
