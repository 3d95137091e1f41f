"""What a run prints before the RESULT line: tables with definitions, then what they say in sentences."""

from collections.abc import Callable, Iterator
from functools import partial

from bench.interference.arrangements import COLOCATED, SPLIT, arrangements
from bench.interference.figures import STALL, Figures
from bench.interference.result import ITL, first_s, num_stalls, tokens_per_s
from bench.interference.rounds import Turn, Window
from bench.interference.thread_times import ThreadTimes
from bench.statistics import Spread
from bench.topic import Topic, make_topic

_NONE = "-"


def topics(figures: Figures) -> Iterator[Topic]:
    """In the order in which they are printed."""
    yield _latencies(figures)
    yield _prompts(figures)
    yield _cores(figures)


def _latencies(figures: Figures) -> Topic:
    s = figures.settings
    topic = _titled(
        figures,
        f"Inter-token latency of {s.streams} steady streams, ms; loaded: a prompt of {s.prompt_tokens:,} "
        f"tokens every {s.every_s:g} s",
        "ITL: from one arrival of a token at the client to the next of the same stream; every single gap, no "
        "mean. Every figure: median of the rounds (smallest..largest) of one window's percentile. Ratio: "
        "loaded / idle of the same turn. Gaps between a reply's end and the next one's first token are not "
        "counted, nor are those that several tokens ended at once (text that was no whole character). "
        f"Stall: {STALL}. tokens/s: of all steady streams together. A p99 that "
        f"{s.needed_gaps // s.streams // 100} stalls of all streams do not decide needs {s.needed_gaps:,} "
        "gaps; the fewest in a window were "
        f"{figures.fewest_gaps():,}.",
    )

    def row(label: str, of: Callable[[str], Spread]) -> None:
        topic.table.add_row(label, *(str(of(name)) for name in figures.names))

    for what, value in ITL.items():
        row(f"{what}, idle", lambda name, value=value: figures.idle(name, value).scaled(1000))  # type: ignore[misc]
        row(f"{what}, loaded", lambda name, value=value: figures.loaded(name, value).scaled(1000))  # type: ignore[misc]
        row(f"{what}, ratio", lambda name, value=value: figures.ratio(name, value))  # type: ignore[misc]
        topic.table.add_section()
    row("stalls, idle", lambda name: figures.idle(name, num_stalls))
    row("stalls, loaded", lambda name: figures.loaded(name, num_stalls))
    row("tokens/s, idle", lambda name: figures.idle(name, tokens_per_s))
    row("tokens/s, loaded", lambda name: figures.loaded(name, tokens_per_s))
    return topic


def _prompts(figures: Figures) -> Topic:
    s = figures.settings
    topic = _titled(
        figures,
        "The prompts that arrive",
        "Median of each round, then over rounds. TTFT: from the moment the prompt is due by schedule to its "
        "first text at the client. Prefill: first chunk scheduled to first token sampled, as the worker says."
        " Transfer: first token in hand to last page checked. Short prompts come one after another, with "
        f"nothing else running: {s.short_prompts} of {s.short_prompt_tokens} tokens.",
    )

    def row(label: str, of: Callable[[str], Spread | None]) -> None:
        topic.table.add_row(label, *(_or_none(of(name)) for name in figures.names))

    row(f"TTFT of {s.prompt_tokens:,}, s", lambda name: figures.prompts(name, first_s))
    row("to its second text, s", lambda name: figures.prompts(name, lambda p: p.second_s))
    row("prefill, s", lambda name: _scaled(figures.prompts(name, lambda p: p.prefill_ms), 0.001))
    row("transfer, ms", lambda name: figures.prompts(name, lambda p: p.transfer_ms))
    row("handed over, MB", lambda name: _scaled(figures.prompts(name, lambda p: p.num_bytes), 1e-6))
    row(f"TTFT of {s.short_prompt_tokens}, alone, ms", lambda name: _short_ms(figures, name))
    return topic


def _cores(figures: Figures) -> Topic:
    topic = _titled(
        figures,
        "The decoding process's threads and the load generator, % of one core",
        "Waited: the engine's thread was ready and another thread had its core. Generator lag: how late its "
        "own timers fired, so how late it may have seen a token; CPU: what it took from the workers' cores.",
    )

    def row(label: str, value: Callable[[Turn], float | None], factor: float = 100) -> None:
        found = (figures.turns(name, value) for name in figures.names)
        topic.table.add_row(label, *(_or_none(_scaled(each, factor)) for each in found))

    parts: tuple[tuple[str, Callable[[ThreadTimes], float]], ...] = (
        ("engine's thread", lambda threads: threads.engine_ran_s),
        ("engine's thread waited", lambda threads: threads.engine_waited_s),
        ("event loop", lambda threads: threads.loop_ran_s),
        ("other threads", lambda threads: threads.others_ran_s),
    )
    for label, part in parts:
        row(f"{label}, idle", partial(_share, part, lambda turn: turn.idle))
        row(f"{label}, loaded", partial(_share, part, lambda turn: turn.loaded))
    topic.table.add_section()
    row("generator's CPU, loaded", lambda turn: turn.loaded.generator_cpu)
    row("generator's lag, p99, ms", lambda turn: turn.loaded.generator_lag.p99_s, 1000)
    row("generator's lag, max, ms", lambda turn: turn.loaded.generator_lag.max_s, 1000)
    return topic


def sentences(figures: Figures) -> Iterator[str]:
    """Where the split wins and where it loses, in words."""
    s = figures.settings
    if not figures.has_enough_gaps:
        yield "TOO FEW GAPS: a handful of stalls decides these p99s. The figures mean nothing."
    ratio = figures.short_first_ratio(SPLIT.name, COLOCATED.name)
    verdict = "loses" if ratio.low > 1 else "wins" if ratio.high < 1 else "is level"
    yield (
        f"Prompts of {s.short_prompt_tokens} tokens with nothing else running: the split {verdict}; their "
        f"first text takes {ratio} times as long as colocated. It computes a prompt on one core, where the "
        "colocated worker has both, and the request makes one hop more."
    )
    split, colocated = (figures.idle(each.name, tokens_per_s).median for each in (SPLIT, COLOCATED))
    yield (
        f"Steady streams with no prompt arriving: split {split:.1f} tokens/s, colocated {colocated:.1f}: the "
        "split leaves its prefill core unused then."
    )


def _titled(figures: Figures, title: str, definition: str) -> Topic:
    titles = {each.name: each.title for each in arrangements(figures.settings)}
    return make_topic(title, definition, "", *(titles[name] for name in figures.names))


def _short_ms(figures: Figures, name: str) -> Spread | None:
    return figures.short_first_s(name).scaled(1000) if name in (SPLIT.name, COLOCATED.name) else None


def _share(part: Callable[[ThreadTimes], float], side: Callable[[Turn], Window], turn: Turn) -> float | None:
    window = side(turn)
    return None if window.threads is None else part(window.threads) / window.seconds


def _scaled(value: Spread | None, factor: float) -> Spread | None:
    return None if value is None else value.scaled(factor)


def _or_none(value: Spread | None) -> str:
    return _NONE if value is None else str(value)
