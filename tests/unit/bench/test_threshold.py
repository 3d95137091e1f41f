"""What `baton bench threshold` says, from prompts whose times are known, and who is started for it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.threshold.figures import Figures
from bench.threshold.report import VARIABLE, result_line, sentences, topics
from bench.threshold.rounds import Asked, Company, Round, Way
from bench.threshold.settings import Settings
from bench.threshold.workers import DECODE, PREFILL, make_plan

SETTINGS = Settings(model=Path("tiny"), rounds=3, lengths=(2, 16, 64), streams=2)
LOCAL_S = {2: 0.08, 16: 0.09, 64: 0.3}
STALLS = {2: 1.1, 16: 1.6, 64: 4.0}


def make_round(slowdown: float, *, num_gaps: int = 1000, stall_of_2: float = STALLS[2]) -> Round:
    """A machine that was `slowdown` times slower throughout. Handed over, a second token takes 100 ms."""
    made = Round(idle_gaps_s=[0.05 * slowdown] * num_gaps)
    for length in SETTINGS.lengths:
        for company in Company:
            for way in Way:
                second_s = slowdown * (LOCAL_S[length] if way is Way.LOCAL else 0.1)
                stall = (STALLS | {2: stall_of_2})[length] if way is Way.LOCAL else 1.0
                for factor in (0.9, 1.0, 5.0):  # the middle one counts
                    asked = Asked(
                        way=way,
                        company=company,
                        num_tokens=length,
                        first_s=second_s / 2 * factor,
                        second_s=second_s * factor,
                        gap_s=None if company is Company.ALONE else 0.05 * slowdown * stall * factor,
                    )
                    made.asked.append(asked)
    return made


def make_figures(**changes: float) -> Figures:
    return Figures(SETTINGS, [make_round(slowdown, **changes) for slowdown in (1.0, 2.0, 1.5)])  # type: ignore[arg-type]


def test_the_last_line_has_the_threshold_and_each_length_with_its_range() -> None:
    line = result_line(make_figures())
    assert "\n" not in line
    result = json.loads(line.removeprefix("RESULT "))
    assert result["threshold_tokens"] == 16
    assert not result["within_noise"]
    assert "quick" not in result
    assert list(result["lengths"]) == ["2", "16", "64"]
    found = result["lengths"]["16"]
    assert found["stays"]
    assert found["local_alone_second_ms"] == pytest.approx(135)
    assert found["local_alone_second_ms_range"] == pytest.approx([90, 180])
    assert found["handed_over_beside_streams_first_ms"] == pytest.approx(75)
    assert found["local_gap_idle_p99s"] == pytest.approx(1.6)
    assert (found["rounds_no_slower_alone"], found["rounds_calm"]) == (3, 3)
    assert not result["lengths"]["64"]["stays"]


def test_a_quick_run_says_that_it_measured_nothing() -> None:
    figures = Figures(SETTINGS.quick(), [make_round(1.0)])
    assert json.loads(result_line(figures).removeprefix("RESULT "))["quick"] is True
    *_, last = sentences(figures)
    assert "measured nothing" in last
    assert not any(VARIABLE in sentence for sentence in sentences(figures))


def test_what_to_set_is_said_last_and_what_stops_it_first() -> None:
    first, *_, last = sentences(make_figures())
    assert first.startswith("64 tokens should be handed over: with nothing else running")
    assert "4.00 (4.00..4.00) idle p99s" in first
    assert last.startswith(f"Set {VARIABLE}=16 on the decode workers")


def test_nothing_qualifies_and_the_variable_stays_at_zero() -> None:
    said = list(sentences(make_figures(stall_of_2=2.5)))
    assert said[-1].startswith(f"Set {VARIABLE}=0 ")
    assert any("Longer ones that could stay (16) do not count" in sentence for sentence in said)


def test_what_is_uncertain_is_said() -> None:
    noisy = Figures(SETTINGS, [make_round(1.0), make_round(1.0, stall_of_2=3.0), make_round(1.0)])
    assert any(
        sentence.startswith("WITHIN NOISE: rounds disagree on 2 tokens") for sentence in sentences(noisy)
    )
    few = Figures(replace(SETTINGS, rounds=2), [make_round(1.0, num_gaps=999)] * 2)
    assert any(sentence.startswith("Few idle gaps") for sentence in sentences(few))
    assert any(sentence.startswith("2 of the 3 rounds") for sentence in sentences(few))
    assert len(list(sentences(make_figures()))) == 2, "nothing to doubt"


def test_every_length_has_a_row_in_every_table() -> None:
    console = Console(width=200, record=True, quiet=True)
    tables = list(topics(make_figures()))
    assert [topic.table.row_count for topic in tables] == [3, 3, 3]
    for topic in tables:
        console.print(topic)


def test_workers_get_cores_of_their_own_where_there_are_enough() -> None:
    def commands(threads: int, cores: list[int]) -> dict[str, tuple[str, ...]]:
        plan = make_plan(replace(SETTINGS, threads=threads), cores)
        return {launch.name: launch.command[1:] for launch in plan.launches}

    assert commands(1, [3, 5, 7])[PREFILL] == ("-m", "bench.interference.pinned", "3", "services.prefill")
    assert commands(1, [3, 5, 7])[DECODE] == ("-m", "bench.interference.pinned", "5", "services.decode")
    assert commands(2, [0, 1, 2, 3])[DECODE][2] == "2,3"
    assert commands(2, [0, 1, 2])[DECODE] == ("-m", "services.decode")
    assert commands(1, [])[PREFILL] == ("-m", "services.prefill")


def test_the_threshold_that_is_measured_is_not_in_force_meanwhile() -> None:
    decode = make_plan(SETTINGS, [0, 1]).launches[1]
    assert decode.variables[VARIABLE] == "0"
    assert decode.variables["BATON_LOCAL_PREFILL"] == "fallback"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounds": 0}, "--rounds, --streams and --threads"),
        ({"lengths": (1, 2)}, "--lengths: two tokens or more"),
        ({"lengths": ()}, "--lengths: two tokens or more"),
        ({"lengths": (4, 2)}, "--lengths: in ascending order"),
        ({"lengths": (2, 2)}, "--lengths: in ascending order"),
        ({"stall_bound": 0.5}, "--stall-bound: 1 or more"),
        ({"reply_tokens": 2}, "third token"),
    ],
)
def test_settings_that_measure_nothing_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SETTINGS, **changes)  # type: ignore[arg-type]
