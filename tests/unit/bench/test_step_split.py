"""Which steps count, and into which part their time goes."""

import pytest

from bench.engine.step_split import split_decode_steps
from bench.errors import BenchFailed
from services.engine.step_times import StepTimes


def step(num_sequences: int, num_tokens: int, forward_s: float = 0.9) -> StepTimes:
    return StepTimes(
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        schedule_s=0.01,
        forward_s=forward_s,
        sample_s=0.04,
        take_in_s=0.05,
        detokenize_s=0.02,
    )


def test_only_steps_of_the_whole_batch_and_nothing_else_count() -> None:
    prompts, partial = step(4, 200, forward_s=9), step(3, 3, forward_s=9)
    split = split_decode_steps([prompts, step(4, 4), partial, step(4, 4)], batch=4, at_least=2)
    assert split.num_steps == 2
    assert split.forward_s == pytest.approx(0.9)


def test_the_parts_add_up_to_the_step() -> None:
    split = split_decode_steps([step(1, 1)], batch=1, at_least=1)
    assert split.sampling_s == pytest.approx(0.04)
    assert split.detokenizing_s == pytest.approx(0.02)
    assert split.scheduling_s == pytest.approx(0.01 + 0.05 - 0.02)
    assert split.step_s == pytest.approx(0.9 + 0.01 + 0.04 + 0.05)
    assert split.overhead == pytest.approx(0.1)


def test_too_few_such_steps_are_no_measurement() -> None:
    with pytest.raises(BenchFailed, match="only 1 steps, not 2"):
        split_decode_steps([step(4, 4), step(3, 3)], batch=4, at_least=2)
