"""Definitions of what is compared, with contestants whose times are known."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.engine.compare import Comparer
from bench.engine.contestant import Timed, check_replies
from bench.engine.settings import PEER_BATCH, Settings
from bench.engine.workload import Prompt
from bench.errors import BenchFailed

SETTINGS = Settings(model=Path("none"), peer_prompt=100, peer_tokens=11, prefills=(256, 1024))


class Scripted:
    """Prefill: 1 ms a prompt token. Decode: 10 ms a step, whatever the batch."""

    def __init__(self, name: str, log: list[str], step_s: float = 0.01) -> None:
        self.name = name
        self.prompts: list[Prompt] = []
        self._log = log
        self._step_s = step_s

    async def single(self, prompt: Prompt, num_tokens: int) -> Timed:
        return await self.batch([prompt], num_tokens)

    async def batch(self, prompts: Sequence[Prompt], num_tokens: int) -> Timed:
        self.prompts += prompts
        self._log.append(self.name)
        seconds = 0.001 * sum(map(len, prompts)) + self._step_s * (num_tokens - 1)
        return Timed(seconds, tuple(prompt[:num_tokens] for prompt in prompts))


async def test_prefill_is_left_out_of_steps_and_decode_but_not_of_the_whole_run() -> None:
    contestant = Scripted("a", [])
    compared = (await Comparer(SETTINGS, 1000).compare([contestant], turn=0))["a"]
    assert compared.step_s == pytest.approx(0.01)
    assert compared.decode_tokens_per_s == pytest.approx(PEER_BATCH / 0.01)
    assert compared.run_tokens_per_s == pytest.approx(PEER_BATCH * 11 / (1.6 + 0.1))
    assert compared.prefill_s == pytest.approx({256: 0.256, 1024: 1.024})
    assert len(compared.batch_replies) == PEER_BATCH
    assert len(compared.single_replies) == 1


async def test_everybody_gets_the_same_prompts_and_none_of_them_twice() -> None:
    log: list[str] = []
    contestants = [Scripted(name, log) for name in "abc"]
    comparer = Comparer(SETTINGS, 1000)
    await comparer.warm_up(contestants)
    for turn in range(2):
        await comparer.compare(contestants, turn)
    first, second, third = (contestant.prompts for contestant in contestants)
    assert sorted(first) == sorted(second) == sorted(third)
    assert len(set(first)) == len(first)


async def test_another_one_begins_each_round() -> None:
    log: list[str] = []
    contestants = [Scripted(name, log) for name in "abc"]
    begun = []
    for turn in range(4):
        log.clear()
        await Comparer(SETTINGS, 1000).compare(contestants, turn)
        begun.append(log[0])
    assert begun == ["a", "b", "c", "a"]


async def test_a_first_token_as_late_as_the_last_is_no_measurement() -> None:
    with pytest.raises(BenchFailed, match="too busy"):
        await Comparer(SETTINGS, 1000).compare([Scripted("a", [], step_s=0)], turn=0)


def test_replies_must_be_as_many_and_as_long_as_asked_for() -> None:
    check_replies("a", [(1, 2), (3, 4)], 2, 2)
    with pytest.raises(BenchFailed, match="1 replies"):
        check_replies("a", [(1, 2)], 2, 2)
    with pytest.raises(BenchFailed, match=r"\[1, 2\] tokens"):
        check_replies("a", [(1, 2), (3,)], 2, 2)
    with pytest.raises(BenchFailed):
        check_replies("a", [], 2, 2)
