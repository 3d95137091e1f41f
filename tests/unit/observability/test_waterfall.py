"""What the drawing says is what was measured, at any width, with and without a terminal."""

import io

import pytest
from rich.console import Console

from observability.timings import HandoffStages, TtftStages
from observability.waterfall import ReplyTimes, Waterfall, find_stalls, one_clock

TTFT = TtftStages.from_parts(
    100.0, gateway=5, decode_queue=10, prefill_queue=5, prefill=60, text_hold=10, log_append=2, flush=1
)
REPLY = ReplyTimes(
    title="reply-1  done",
    ttft=TTFT,
    handoff=HandoffStages(kv_transfer=4.0, join=1.0, first_step=15.0),
    deltas_ms={0: [100.0, 120.0, 140.0, 160.0, 960.0, 980.0, 1000.0]},
)


def draw(reply: ReplyTimes, width: int = 80, *, ascii_only: bool = True) -> list[str]:
    return Waterfall(width, ascii_only=ascii_only).render(reply).plain.splitlines()


def lane(lines: list[str], process: str) -> str:
    return next(line for line in lines if line.startswith(f"{process:<9} "))[10:]


def test_one_lane_per_process_on_a_common_axis() -> None:
    lines = draw(REPLY, width=110)  # 100 columns of bar, 1 ms each
    assert lane(lines, "gateway") == "ggggg" + " " * 85 + "llf" + " " * 7
    assert lane(lines, "decode") == " " * 5 + "d" * 10 + " " * 65 + "h" * 10 + " " * 10
    assert lane(lines, "prefill") == " " * 15 + "q" * 5 + "P" * 60 + " " * 20
    assert lane(lines, "between") == " " * 93 + "r" * 7


def test_milliseconds_and_shares() -> None:
    lines = draw(REPLY)
    assert "time to first token: 100.0 ms" in lines
    assert "P prefill             60.0 ms  60.0%" in lines
    assert "l log_append           2.0 ms   2.0%" in lines
    assert "handoff gap, first to second token: 20.0 ms" in lines
    assert "s first_step          15.0 ms  75.0%" in lines


def test_deltas_and_stalls() -> None:
    lines = draw(REPLY)
    title = "deltas: 7, from 100 to 1000 ms; gaps: median 20.0 ms, longest 800.0 ms"
    ticks = lines[lines.index(title) + 1]
    assert ticks.count("|") == 7
    assert "|~~~~~" in ticks
    assert lines[-1] == "  stall of 800 ms after delta 4, at 160 ms"


@pytest.mark.parametrize("width", [0, 40, 41, 79, 80, 200])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_no_line_is_wider_than_asked(width: int, *, ascii_only: bool) -> None:
    lines = [
        line
        for line in draw(REPLY, width, ascii_only=ascii_only)
        if line.startswith(("gateway ", "decode ", "prefill ", "between ", "          "))
    ]
    assert len(lines) == 6
    assert {len(line) for line in lines} == {max(width, 40)}


def test_ascii_without_a_terminal_colour_with_one() -> None:
    assert "\n".join(draw(REPLY)).isascii()
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system="standard", width=80)
    terminal.print(Waterfall(80, ascii_only=False).render(REPLY))
    assert "\x1b[32m" in out.getvalue()
    assert "█" in out.getvalue()


def test_a_short_stage_is_never_invisible() -> None:
    ttft = TtftStages(prefill=10_000.0, log_append=0.2, flush=0.1, relay=0.1)
    lines = draw(ReplyTimes(title="", ttft=ttft), width=60)
    assert lane(lines, "gateway").strip() in {"l", "f", "lf"}
    assert "r" in lane(lines, "between")


def test_short_neighbours_do_not_hide_each_other() -> None:
    ttft = TtftStages(log_append=0.2, flush=0.1, relay=1000.0)
    assert lane(draw(ReplyTimes(title="", ttft=ttft)), "gateway").strip() == "lf"


def test_nothing_measured_yet() -> None:
    assert draw(ReplyTimes(title="reply-1  queued")) == ["reply-1  queued", "", "no text yet"]


def test_zero_everywhere_divides_by_nothing() -> None:
    reply = ReplyTimes(title="", ttft=TtftStages(), deltas_ms={0: [5.0]})
    assert any(line == "deltas: 1, from 5 to 5 ms" for line in draw(reply))
    assert any(line.strip() == "|" for line in draw(reply))


def test_each_choice_has_its_ticks() -> None:
    lines = draw(ReplyTimes(title="", deltas_ms={1: [1.0, 2.0], 0: [1.0, 3.0]}))
    assert sum(line.startswith("deltas of choice") for line in lines) == 2


def test_an_even_stream_has_no_stalls() -> None:
    assert find_stalls([33.0 * i for i in range(50)]) == []
    assert find_stalls([5.0]) == []
    # Three times the median, yet too short for anybody to notice.
    assert find_stalls([0.0, 1.0, 2.0, 3.0, 60.0]) == []


def test_a_takeovers_clock_is_joined_to_the_first() -> None:
    assert one_clock([100.0, 120.0, 30.0, 50.0]) == [100.0, 120.0, 120.0, 140.0]
