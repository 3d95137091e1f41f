"""From rounds to figures, tables, the RESULT line and the picture."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.engine.figures import Agreement, Figures, decode_tokens_per_s, step_s
from bench.engine.measure import EXACT, FAST, Measured
from bench.engine.plot import save_plot
from bench.engine.report import result_line, topics
from bench.statistics import Spread
from tests.unit.bench.rounds import SETTINGS, make_figures, make_round


def test_ratios_are_taken_within_a_round() -> None:
    figures = make_figures()
    assert figures.ratio(FAST, decode_tokens_per_s) == Spread(4.0, 4.0, 4.0)  # the slow round hurt both
    assert figures.ratio(EXACT, step_s) == Spread(0.5, 0.5, 0.5)
    assert figures.compared(FAST, step_s) == Spread(0.02, 0.02, 0.04)


def test_the_share_of_the_floor_takes_each_rounds_own_bandwidth() -> None:
    figures = make_figures()
    tokens = 100 + figures.settings.sweep_tokens / 2
    floor_bytes = 100_000_000 * 2 + 1_000_000 * 4 + tokens * 46_080
    fraction = figures.bandwidth_fraction(FAST, 100)
    assert fraction is not None
    assert fraction.median == pytest.approx(floor_bytes / 20e9 / 0.02)
    assert fraction.low == pytest.approx(fraction.high)


def test_no_floor_no_fraction() -> None:
    unknown = Figures(SETTINGS, Measured([make_round(1.0)], kv_bytes_per_token=1), weights=None)
    assert unknown.bandwidth_fraction(FAST, 100) is None
    assert unknown.result()["bandwidth_fraction_b1"] is None


def test_equal_replies_are_counted() -> None:
    assert make_figures().agreements() == [
        Agreement(EXACT, "generate", 3, 3),
        Agreement(EXACT, "generate_batch", 6, 6),
        Agreement(FAST, "generate", 3, 3),
        Agreement(FAST, "generate_batch", 3, 6),
        Agreement(FAST, "exact, batch 16", 3, 6),
    ]


def test_the_result_line_holds_medians() -> None:
    name, _, rest = result_line(make_figures()).partition(" ")
    assert name == "RESULT"
    assert json.loads(rest) == {
        "tokens_per_s_ratio_b16": 4.0,
        "step_time_ratio_b1": 0.25,
        "overhead_b16": 0.1,
        "bandwidth_fraction_b1": 0.5229,
        "exact_tokens_per_s_ratio_b16": 2.0,
        "exact_step_time_ratio_b1": 0.5,
        "exact_overhead_b16": 0.1,
        "loop_lag_p99_ms": 2.0,
    }


def test_without_a_peer_the_ratios_are_null() -> None:
    result = json.loads(result_line(make_figures(peers=False)).removeprefix("RESULT "))
    assert {name for name, value in result.items() if value is None} == {
        "tokens_per_s_ratio_b16",
        "step_time_ratio_b1",
        "exact_tokens_per_s_ratio_b16",
        "exact_step_time_ratio_b1",
    }


@pytest.mark.parametrize("peers", [True, False])
def test_every_table_has_its_definition_under_it(*, peers: bool) -> None:
    console = Console(width=160, file=io.StringIO())
    figures = make_figures(peers=peers)
    found = list(topics(figures))
    for topic in found:
        console.print(topic)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert len(found) == 5
    for topic in found:
        assert topic.title in text
        assert topic.definition.split(".")[0][:60] in text
    assert ("exact / theirs" in text) is peers
    assert "20.0 (20.0..40.0)" in text, "the fast step in ms, with its range"


@pytest.mark.parametrize("peers", [True, False])
def test_a_picture_is_drawn(tmp_path: Path, *, peers: bool) -> None:
    save_plot(make_figures(peers=peers), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
