"""What `baton bench interference` says, from gaps that are known."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.interference.arrangements import CHUNKED, COLOCATED, SPLIT, make_plan
from bench.interference.figures import Figures, itl, stall_s
from bench.interference.report import sentences
from bench.interference.result import result
from bench.interference.rounds import Gap, PromptTimes, Round, Turn, Window
from bench.interference.settings import CHUNK_TOKENS, Settings
from bench.loop_lag import LoopLag

SETTINGS = Settings(model=Path("tiny"), rounds=3, streams=2)
NAMES = (SPLIT.name, COLOCATED.name, CHUNKED.name)


def make_window(seconds: Sequence[float], *held: float, prompts: Sequence[PromptTimes] = ()) -> Window:
    """Gaps of one token each, and `held` ones that two tokens ended."""
    gaps = [Gap(0, 0.1 * n, each) for n, each in enumerate(seconds)]
    gaps += [Gap(1, 0.1 * n, each, num_tokens=2) for n, each in enumerate(held)]
    lag = LoopLag(num_sleeps=10, p50_s=0.0, p99_s=0.001, max_s=0.002)
    return Window(
        seconds=10.0,
        gaps=tuple(gaps),
        prompts=tuple(prompts),
        num_restarts=0,
        generator_cpu=0.02,
        generator_lag=lag,
        threads=None,
    )


def make_round(slowdown: float, *, num_gaps: int = 1000, short_ratio: float = 2.0) -> Round:
    """A machine that was `slowdown` times slower throughout. Under load 2 % of the gaps are 3 times as long
    when split, 10 times when colocated, 5 times in chunks."""
    made = Round(short_first_s={SPLIT.name: [0.2 * short_ratio * slowdown], COLOCATED.name: [0.2 * slowdown]})
    for name, factor in zip(NAMES, (3, 10, 5), strict=True):
        idle = [0.04 * slowdown] * num_gaps
        loaded = [0.04 * slowdown * (factor if n % 50 == 0 else 1) for n in range(num_gaps)]
        prompt = PromptTimes(due_s=0.0, first_s=4.0 * slowdown, prefill_ms=3900 * slowdown)
        made.turns[name] = Turn(make_window(idle), make_window(loaded, prompts=[prompt]))
    return made


def make_figures(**changes: float) -> Figures:
    return Figures(SETTINGS, [make_round(slowdown, **changes) for slowdown in (1.0, 2.0, 1.5)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("idle_median_s", "limit_s"),
    [(0.01, 0.05), (0.04, 0.2), (0.1, 0.25), (0.2, 0.4)],
    ids=["five medians", "five medians", "250 ms", "never less than two medians"],
)
def test_a_stall_is_measured_against_the_idle_median(idle_median_s: float, limit_s: float) -> None:
    assert stall_s(idle_median_s) == pytest.approx(limit_s)


def test_stalls_are_counted_and_gaps_that_several_tokens_ended_are_not() -> None:
    idle = make_window([0.04] * 99)
    found = itl(make_window([*[0.04] * 97, 0.19, 0.21, 4.4], 0.5, 0.6), idle)
    assert (found.num_gaps, found.num_held, found.num_stalls) == (100, 2, 2)
    assert (found.p50, found.p99, found.max) == (0.04, 0.21, 4.4)
    assert found.tokens_per_s == pytest.approx((100 + 2 * 2) / 10)


def test_a_ratio_is_taken_where_both_sides_met_the_same_machine() -> None:
    """One round was twice as slow as another, loaded and idle alike."""
    found = result(make_figures())
    assert found["split_p99_itl_ratio"] == pytest.approx(3)
    assert found["colocated_p99_itl_ratio"] == pytest.approx(10)
    assert found["colocated_chunked_p99_itl_ratio"] == pytest.approx(5)
    assert found["split_max_itl_ratio"] == pytest.approx(3)
    assert found["split_p99_itl_ratio_range"] == pytest.approx([3, 3])
    assert found["split_idle_p99_ms"] == pytest.approx(60)
    assert found["split_loaded_stalls"] == 0
    assert found["colocated_loaded_stalls"] == 20
    assert found["split_long_prompt_ttft_ms"] == pytest.approx(6000)
    assert found["enough_gaps"]
    assert "quick" not in found


def test_too_few_gaps_are_said_to_be_too_few() -> None:
    assert SETTINGS.needed_gaps == 1000
    few, enough = make_figures(num_gaps=999), make_figures()
    assert not result(few)["enough_gaps"]
    assert next(sentences(few)).startswith("TOO FEW GAPS")
    assert not next(sentences(enough)).startswith("TOO FEW GAPS")


@pytest.mark.parametrize(("ratio", "verdict"), [(2.0, "loses"), (0.5, "wins"), (1.0, "is level")])
def test_where_the_split_loses_is_said_in_words(ratio: float, verdict: str) -> None:
    assert any(f"the split {verdict};" in each for each in sentences(make_figures(short_ratio=ratio)))


def test_every_arrangement_has_the_same_cores_and_threads() -> None:
    plan = {launch.name: launch for launch in make_plan(SETTINGS, [3, 5, 7]).launches}

    def cores(name: str) -> str:
        return plan[name].command[3]

    def threads(name: str) -> int:
        return int(plan[name].variables["BATON_THREADS"])

    assert {cores("prefill-0"), cores("decode-0")} == {"3", "5"}
    assert threads("prefill-0") + threads("decode-0") == 2
    for colocated in (COLOCATED.decode, CHUNKED.decode):
        assert (cores(colocated), threads(colocated)) == ("3,5", 2)
    assert plan[COLOCATED.decode].variables["BATON_PREFILL_CHUNK"] == str(SETTINGS.prompt_tokens)
    assert plan[CHUNKED.decode].variables["BATON_PREFILL_CHUNK"] == str(CHUNK_TOKENS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"streams": 0}, "must be positive"),
        ({"every_s": 0.0}, "must be positive"),
        ({"duration_s": 5.0}, "long enough for one prompt"),
        ({"reply_tokens": 1}, "needs no handoff"),
    ],
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(model=Path("tiny"), **changes)  # type: ignore[arg-type]
