"""What a run prints: tables with definitions, what they say in sentences, and the RESULT line."""

import json
from collections.abc import Iterator

from bench.statistics import Spread
from bench.threshold.decision import TIE, Verdict
from bench.threshold.figures import Figures
from bench.threshold.rounds import Company, Way
from bench.topic import Topic, make_topic

VARIABLE = "BATON_LOCAL_PREFILL_MAX_TOKENS"
_ENOUGH_ROUNDS = 3


def topics(figures: Figures) -> Iterator[Topic]:
    """In the order in which they are printed."""
    s = figures.settings
    yield _times(
        figures,
        Company.ALONE,
        "A prompt with nothing else running, ms to its first and its second token",
        f"From request sent to token in hand. Median of {s.asks} prompts of each round, then over rounds "
        "(smallest..largest). Handed over: prefill computes, the KV cache travels. Local: decode computes. "
        "Nothing of a prompt is in a prefix cache; both ways are asked the same prompts. No slower: rounds "
        f"in which local's second token came no later; {TIE:.0%} is a tie and counts.",
    )
    yield _times(
        figures,
        Company.BESIDE,
        f"The same beside {s.streams} steady streams, ms",
        "Sent at any moment of a step; otherwise as above. These times decide nothing: both ways wait for "
        "the end of a step, so which is ahead is chance until they are a step apart.",
    )
    yield _gaps(figures)


def _times(figures: Figures, company: Company, title: str, definition: str) -> Topic:
    topic = make_topic(
        title,
        definition,
        *("prompt tokens", "handed over: first", "second", "local: first", "second", "no slower in"),
    )
    for verdict in figures.decision.verdicts:
        times = [
            str(of(verdict.num_tokens, company, way).scaled(1000))
            for way in Way
            for of in (figures.first_s, figures.second_s)
        ]
        answer = verdict.no_slower[company]
        topic.table.add_row(f"{verdict.num_tokens:,}", *times, f"{answer.num_yes} of {answer.num_rounds}")
    return topic


def _gaps(figures: Figures) -> Topic:
    s = figures.settings
    topic = make_topic(
        f"What the {s.streams} steady streams notice: their longest gap around the prompt",
        "From the prompt's sending to its second token, any stream, ms; and in p99s of the gaps of the same "
        f"round with no prompt there. Those are {figures.idle_p50_s().scaled(1000)} ms in the median and "
        f"{figures.idle_p99_s().scaled(1000)} ms in the p99, of at least {figures.fewest_idle_gaps():,}. "
        f"Calm: rounds in which local's was at most {s.stall_bound:g} p99s. Stays: by medians, local is no "
        "slower with nothing else running, and calm.",
        *("prompt tokens", "handed over, ms", "p99s", "local, ms", "p99s", "calm in", "stays", "rounds"),
    )
    for verdict in figures.decision.verdicts:
        gaps = [
            str(gap)
            for way in Way
            for gap in (
                figures.gap_s(verdict.num_tokens, way).scaled(1000),
                figures.stall(verdict.num_tokens, way),
            )
        ]
        calm = f"{verdict.no_stall.num_yes} of {verdict.no_stall.num_rounds}"
        stays = "yes" if verdict.qualifies else "no"
        agree = "disagree" if verdict.is_within_noise else "agree"
        topic.table.add_row(f"{verdict.num_tokens:,}", *gaps, calm, stays, agree)
    return topic


def sentences(figures: Figures) -> Iterator[str]:
    """The threshold, why it is not higher, what is uncertain, and what to set."""
    s, decision = figures.settings, figures.decision
    if decision.stopped_by is not None:
        yield f"{decision.stopped_by.num_tokens:,} tokens should be handed over: " + "; ".join(
            _reasons(figures, decision.stopped_by)
        )
    else:
        yield "Every length measured may stay, so the threshold may lie higher: measure longer --lengths."
    if decision.left_out:
        listed = ", ".join(f"{length:,}" for length in decision.left_out)
        yield f"Longer ones that could stay ({listed}) do not count: shorter ones would stay with them."
    if decision.slower_beside:
        listed = ", ".join(f"{length:,}" for length in decision.slower_beside)
        yield f"Beside the streams, local's second token came later in every round at {listed} tokens."
    if decision.is_within_noise:
        listed = ", ".join(f"{length:,}" for length in decision.uncertain)
        yield (
            f"WITHIN NOISE: rounds disagree on {listed} tokens, on which it rests. More --rounds, or a "
            "quieter machine."
        )
    if s.rounds < _ENOUGH_ROUNDS:
        yield f"{s.rounds} of the {_ENOUGH_ROUNDS} rounds that it takes to see whether they agree."
    if figures.fewest_idle_gaps() < figures.needed_idle_gaps:
        yield (
            f"Few idle gaps: with less than {figures.needed_idle_gaps:,} in a round, single steps decide "
            "their p99. More --lengths bring more."
        )
    if s.is_quick:
        yield "A self-check: it ran through, and measured nothing. Set nothing by it."
    elif decision.threshold_tokens:
        yield (
            f"Set {VARIABLE}={decision.threshold_tokens} on the decode workers (with BATON_LOCAL_PREFILL="
            "fallback, the default)."
        )
    else:
        yield f"Set {VARIABLE}=0 on the decode workers (the default): every prompt is handed over."


def _reasons(figures: Figures, verdict: Verdict) -> Iterator[str]:
    length, no_slower = verdict.num_tokens, verdict.no_slower[Company.ALONE]
    if not no_slower.is_yes:
        local, handed_over = (
            figures.second_s(length, Company.ALONE, way).scaled(1000) for way in (Way.LOCAL, Way.HANDED_OVER)
        )
        yield (
            f"with nothing else running, their second token takes {local} ms locally and {handed_over} ms "
            f"handed over (local no slower in {no_slower.num_yes} of {no_slower.num_rounds} rounds)"
        )
    if not verdict.no_stall.is_yes:
        yield (
            f"computed locally, they hold the streams up for {figures.stall(length, Way.LOCAL)} idle p99s, "
            f"where {figures.settings.stall_bound:g} are allowed (kept to in {verdict.no_stall.num_yes} of "
            f"{verdict.no_stall.num_rounds} rounds)"
        )


def result(figures: Figures) -> dict[str, object]:
    """Medians over rounds, with smallest and largest, to four digits; `quick` where nothing was measured."""
    decision = figures.decision
    found: dict[str, object] = {"quick": True} if figures.settings.is_quick else {}
    return found | {
        "threshold_tokens": decision.threshold_tokens,
        "within_noise": decision.is_within_noise,
        "rounds": figures.settings.rounds,
        "idle_p99_ms": _short(figures.idle_p99_s().median * 1000),
        "lengths": {str(verdict.num_tokens): _of_length(figures, verdict) for verdict in decision.verdicts},
    }


def result_line(figures: Figures) -> str:
    """The last line of stdout."""
    return "RESULT " + json.dumps(result(figures))


def _of_length(figures: Figures, verdict: Verdict) -> dict[str, object]:
    length = verdict.num_tokens
    spreads: dict[str, Spread] = {}
    for way in Way:
        for company in Company:
            spreads[f"{way}_{company}_first_ms"] = figures.first_s(length, company, way).scaled(1000)
            spreads[f"{way}_{company}_second_ms"] = figures.second_s(length, company, way).scaled(1000)
        spreads[f"{way}_gap_ms"] = figures.gap_s(length, way).scaled(1000)
        spreads[f"{way}_gap_idle_p99s"] = figures.stall(length, way)
    found: dict[str, object] = {"stays": verdict.qualifies, "within_noise": verdict.is_within_noise}
    for company, answer in verdict.no_slower.items():
        found[f"rounds_no_slower_{company}"] = answer.num_yes
    found["rounds_calm"] = verdict.no_stall.num_yes
    for name, value in spreads.items():
        found[name] = _short(value.median)
        found[f"{name}_range"] = [_short(value.low), _short(value.high)]
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")
