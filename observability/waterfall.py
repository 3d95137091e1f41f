"""One reply's time as terminal text: the stages of its first token, its handoff gap, its deltas.

Pure: stages and stamps in, text out, as wide as asked. On a terminal bars are coloured blocks; elsewhere
each stage is drawn with a letter of its own, in plain ASCII. Must not know: where a reply comes from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rich.text import Text

from observability.timings import HandoffStages, TtftStages

_MIN_WIDTH = 40
_LANE_WIDTH = 9
_STALL_FACTOR = 3.0  # times the median gap ...
_STALL_MS = 100.0  # ... and long enough to be felt
_MAX_STALLS = 5


@dataclass(frozen=True, slots=True)
class Lane:
    """How one stage is drawn: the process it runs in, its letter, its colour."""

    process: str
    letter: str
    colour: str


# In the order in which they happen; `relay` is spread over the way and drawn at its end.
STAGE_LANES: Mapping[str, Lane] = {
    "gateway": Lane("gateway", "g", "cyan"),
    "decode_queue": Lane("decode", "d", "yellow"),
    "prefill_queue": Lane("prefill", "q", "bright_yellow"),
    "prefill": Lane("prefill", "P", "green"),
    "text_hold": Lane("decode", "h", "magenta"),
    "log_append": Lane("gateway", "l", "blue"),
    "flush": Lane("gateway", "f", "bright_blue"),
    "relay": Lane("between", "r", "white"),
    "kv_transfer": Lane("decode", "k", "yellow"),
    "join": Lane("decode", "j", "magenta"),
    "first_step": Lane("decode", "s", "green"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyTimes:
    """What there is to draw.

    Args:
        title: the first line.
        ttft: None if no text has come yet.
        handoff: None if prefill ran where decode did.
        deltas_ms: for each choice, when its deltas came, in ms since the request arrived.
    """

    title: str
    ttft: TtftStages | None = None
    handoff: HandoffStages | None = None
    deltas_ms: Mapping[int, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stall:
    """A gap that a reader would notice."""

    after: int  # index of the delta before it
    start_ms: float
    length_ms: float


def find_stalls(at_ms: Sequence[float]) -> list[Stall]:
    """Gaps well above the median one, longest first."""
    gaps = [later - earlier for earlier, later in pairwise(at_ms)]
    if not gaps:
        return []
    limit = max(_STALL_FACTOR * median(gaps), _STALL_MS)
    stalls = [Stall(i, at_ms[i], gap) for i, gap in enumerate(gaps) if gap > limit]
    return sorted(stalls, key=lambda stall: -stall.length_ms)


def one_clock(at_ms: Sequence[float]) -> list[float]:
    """The stamps on one axis. Another gateway that takes over counts on its own clock, maybe from less;
    how long the change took cannot be told from two clocks, so it takes no time here."""
    joined: list[float] = []
    offset = 0.0
    for i, stamp in enumerate(at_ms):
        if i and stamp < at_ms[i - 1]:
            offset = joined[-1] - stamp
        joined.append(stamp + offset)
    return joined


class Waterfall:
    """Draws replies.

    Args:
        width: columns of the terminal; fewer than 40 are taken as 40.
        ascii_only: letters instead of coloured blocks.
    """

    def __init__(self, width: int, *, ascii_only: bool) -> None:
        self._ascii = ascii_only
        self._bar_width = max(width, _MIN_WIDTH) - _LANE_WIDTH - 1

    def render(self, reply: ReplyTimes) -> Text:
        """The whole picture; it ends with a newline."""
        text = Text(f"{reply.title}\n", no_wrap=True)
        if reply.ttft is None:
            text.append("\nno text yet\n")
        else:
            stages = reply.ttft.as_dict()
            total = stages.pop("ttft")
            self._stages(text, "time to first token", stages, total)
        if reply.handoff is not None:
            self._stages(
                text, "handoff gap, first to second token", reply.handoff.as_dict(), reply.handoff.total
            )
        for choice, at_ms in sorted(reply.deltas_ms.items()):
            if at_ms:
                name = "deltas" if len(reply.deltas_ms) == 1 else f"deltas of choice {choice}"
                self._deltas(text, name, one_clock(at_ms))
        return text

    def _stages(self, text: Text, title: str, stages: Mapping[str, float], total: float) -> None:
        text.append(f"\n{title}: {total:.1f} ms\n", "bold")
        cells: dict[str, list[str | None]] = {}
        begin = 0.0
        for stage, stage_ms in stages.items():
            lane = cells.setdefault(STAGE_LANES[stage].process, [None] * self._bar_width)
            if stage_ms > 0 and total > 0:
                self._fill(lane, stage, begin / total, (begin + stage_ms) / total)
            begin += stage_ms
        for process, lane in cells.items():
            text.append(f"{process:<{_LANE_WIDTH}} ")
            for cell in lane:
                self._cell(text, cell)
            text.append("\n")
        for stage, stage_ms in stages.items():
            share = stage_ms / total if total else 0.0
            self._cell(text, stage)
            text.append(f" {stage:<14} {stage_ms:>9.1f} ms {share:>6.1%}\n")

    def _fill(self, lane: list[str | None], stage: str, begin: float, end: float) -> None:
        """Draws [begin, end), shares of the axis. What took time shows, in one cell at least."""
        last = len(lane) - 1
        start = min(round(begin * len(lane)), last)
        stop = max(round(end * len(lane)), start + 1)
        if lane[start] is not None:
            # Short neighbours in one lane would hide each other.
            free = [i for i in range(start, len(lane)) if lane[i] is None]
            start = free[0] if free else last
            stop = max(stop, start + 1)
        for i in range(start, min(stop, len(lane))):
            lane[i] = stage

    def _cell(self, text: Text, stage: str | None) -> None:
        if stage is None:
            text.append(" ")
        elif self._ascii:
            text.append(STAGE_LANES[stage].letter)
        else:
            text.append("█", STAGE_LANES[stage].colour)

    def _deltas(self, text: Text, name: str, at_ms: Sequence[float]) -> None:
        begin, end = at_ms[0], at_ms[-1]
        gaps = sorted(later - earlier for earlier, later in pairwise(at_ms))
        title = f"\n{name}: {len(at_ms)}, from {begin:.0f} to {end:.0f} ms"
        if gaps:
            title += f"; gaps: median {median(gaps):.1f} ms, longest {gaps[-1]:.1f} ms"
        text.append(f"{title}\n", "bold")
        stalls = find_stalls(at_ms)
        text.append(" " * (_LANE_WIDTH + 1))
        stalled = {
            cell
            for stall in stalls
            for cell in range(
                self._column(stall.start_ms, begin, end) + 1,
                self._column(stall.start_ms + stall.length_ms, begin, end),
            )
        }
        ticks = {self._column(stamp, begin, end) for stamp in at_ms}
        for cell in range(self._bar_width):
            if cell in ticks:
                text.append("|" if self._ascii else "▏", "green")
            elif cell in stalled:
                text.append("~" if self._ascii else "━", "red")
            else:
                text.append(" ")
        text.append("\n")
        for stall in stalls[:_MAX_STALLS]:
            text.append(
                f"  stall of {stall.length_ms:.0f} ms after delta {stall.after + 1}, "
                f"at {stall.start_ms:.0f} ms\n",
                "red",
            )
        if len(stalls) > _MAX_STALLS:
            text.append(f"  and {len(stalls) - _MAX_STALLS} shorter ones\n", "red")

    def _column(self, stamp: float, begin: float, end: float) -> int:
        if end <= begin:
            return 0
        return round((stamp - begin) / (end - begin) * (self._bar_width - 1))
