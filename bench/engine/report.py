"""What a run prints: one table per topic with its definition under it, and the RESULT line."""

import json
from collections.abc import Callable, Iterator

from bench.engine.figures import PEER, Figures, decode_tokens_per_s, run_tokens_per_s, step_s
from bench.engine.measure import EXACT, FAST
from bench.engine.rounds import Comparison
from bench.statistics import Spread, spread
from bench.topic import Topic, make_topic

_MODES = (EXACT, FAST)
_NONE = "-"


def result_line(figures: Figures) -> str:
    """The last line of stdout."""
    return "RESULT " + json.dumps(figures.result())


def topics(figures: Figures) -> Iterator[Topic]:
    """In the order in which they are printed."""
    yield _steps(figures)
    yield _features(figures)
    yield _floor(figures)
    yield _comparison(figures)
    yield _agreement(figures)


def _steps(figures: Figures) -> Topic:
    topic = make_topic(
        "Decode steps, greedy",
        "Every figure: median of the rounds (smallest..largest). Step: mean of the steps in which the "
        "whole batch ran and nothing else; its parts beside it, medians in ms. Scheduling: all of the "
        "engine's loop that is not forward, sampling or detokenizing. Context: prompt tokens of each "
        f"sequence; replies of {figures.settings.sweep_tokens} tokens grow on top. tokens/s: batch / step.",
        *("mode", "context", "batch", "step ms", "forward", "sampling", "detok.", "scheduling", "tokens/s"),
    )
    for context in figures.settings.contexts:
        for batch in figures.settings.batches:
            for mode in _MODES:
                points = figures.sweep_points(mode, batch, context)
                splits = [point.split for point in points]
                topic.table.add_row(
                    mode,
                    str(context),
                    str(batch),
                    _ms(spread(split.step_s for split in splits)),
                    f"{spread(split.forward_s for split in splits).median * 1000:.2f}",
                    f"{spread(split.sampling_s for split in splits).median * 1000:.3f}",
                    f"{spread(split.detokenizing_s for split in splits).median * 1000:.3f}",
                    f"{spread(split.scheduling_s for split in splits).median * 1000:.3f}",
                    str(spread(point.tokens_per_s for point in points)),
                )
        topic.table.add_section()
    return topic


def _features(figures: Figures) -> Topic:
    topic = make_topic(
        "Batch 16 with every sampling feature on",
        "Temperature, top-k, top-p, min-p, three penalties, logit bias, 5 logprobs, stop strings, "
        "min_tokens, seeds. Overhead: share of a step outside the forward pass. Lag: how late a task that "
        "sleeps 5 ms wakes on the event loop meanwhile.",
        *("mode", "step ms", "sampling ms", "overhead %", "lag p50 ms", "lag p99 ms", "lag max ms"),
    )
    for mode in _MODES:
        points = figures.features(mode)
        topic.table.add_row(
            mode,
            _ms(spread(point.split.step_s for point in points)),
            _ms(spread(point.split.sampling_s for point in points)),
            str(figures.overhead_b16(mode).scaled(100)),
            _ms(spread(point.lag.p50_s for point in points)),
            _ms(spread(point.lag.p99_s for point in points)),
            _ms(spread(point.lag.max_s for point in points)),
        )
    return topic


def _floor(figures: Figures) -> Topic:
    size = figures.settings.bandwidth_bytes // 2**20
    topic = make_topic(
        f"Batch 1 against the memory-bandwidth floor; measured {figures.bytes_per_s.scaled(1e-9)} GB/s",
        f"Bandwidth: the best of several sums over {size} MiB by torch, {figures.settings.threads} "
        "thread(s), in each round. Floor: (bytes of weights + bytes of active KV) / bandwidth; linear "
        "weights in the mode's width (`fast`: 2 bytes, its narrowest), the output head whole, the embedding "
        "table not, KV at half of the reply. Fraction: floor / step; 1 would be the floor itself.",
        *("mode", "context", "weights MB", "KV MB", "floor ms", "fraction"),
    )
    for context in figures.settings.contexts:
        for mode in _MODES:
            fraction = figures.bandwidth_fraction(mode, context)
            needed = figures.floor_bytes(mode, context)
            if fraction is None or needed is None:
                topic.table.add_row(mode, str(context), *[_NONE] * 4)
                continue
            weights, kv = needed
            floor = spread((weights + kv) / each.bytes_per_s for each in figures.rounds)
            topic.table.add_row(
                mode, str(context), f"{weights / 1e6:.1f}", f"{kv / 1e6:.1f}", _ms(floor), str(fraction)
            )
    return topic


def _comparison(figures: Figures) -> Topic:
    s = figures.settings
    names = [*_MODES, PEER] if s.peers else list(_MODES)
    topic = make_topic(
        "Ours, through the whole engine, and transformers in fp32; same prompts, threads and minutes",
        f"Step: one stream, prompt {s.peer_prompt}; (time of {s.peer_tokens} tokens - time of 1) / "
        f"{s.peer_tokens - 1}; theirs by `generate`. Decode tokens/s: 16 streams of such prompts at once; "
        f"(tokens of {s.peer_tokens} each - tokens of 1 each) / (difference of their times); theirs by "
        "`generate_batch`, manager kept, our token budget. It leaves out the prefill, which flatters "
        "whoever is slow at it; whole-run tokens/s counts it. The RESULT line takes the former. Prefill: "
        "ms to the first token of one prompt. Ratios: ours / theirs of the same round.",
        *("", *(name if name == PEER else f"ours, {name}" for name in names)),
        *(f"{mode} / theirs" for mode in _MODES if s.peers),
    )

    def row(label: str, value: Callable[[Comparison], float], factor: float = 1) -> None:
        ratios = [figures.ratio(mode, value) for mode in _MODES]
        topic.table.add_row(
            label,
            *(str(figures.compared(name, value).scaled(factor)) for name in names),
            *(str(ratio) for ratio in ratios if ratio is not None),
        )

    row("step, batch 1, ms", step_s, 1000)
    row("decode tokens/s, batch 16", decode_tokens_per_s)
    row("whole-run tokens/s, batch 16", run_tokens_per_s)
    for length in s.prefills:
        row(f"prefill of {length:,} tokens, ms", _prefill(length), 1000)
    return topic


def _agreement(figures: Figures) -> Topic:
    topic = make_topic(
        "Greedy replies that are equal, token for token",
        "Of one stream for `generate`, of 16 at once otherwise. The exact mode should equal fp32 but for "
        "ties; the fast mode rounds weights, so its replies part where two tokens are nearly as good. "
        "Prompts are random tokens, after which near ties are frequent.",
        *("ours", "with", "equal", "of"),
    )
    for found in figures.agreements():
        topic.table.add_row(found.ours, found.theirs, str(found.num_equal), str(found.num_replies))
    return topic


def _prefill(length: int) -> Callable[[Comparison], float]:
    return lambda comparison: comparison.prefill_s[length]


def _ms(seconds: Spread) -> str:
    return str(seconds.scaled(1000))
