"""What a run prints before the RESULT line, and that line."""

import statistics
from collections.abc import Mapping

from bench.payload.measure import Measured
from bench.payload.settings import Settings
from bench.statistics import percentile, spread
from bench.topic import Topic, make_topic
from services.kv.payload import PayloadFormat

Found = Mapping[PayloadFormat, Measured]


def topic(settings: Settings, found: Found) -> Topic:
    """The one table."""
    made = make_topic(
        f"{settings.prompts} replies of {settings.reply_tokens} tokens to {settings.prompt_tokens} of prose",
        "Equal: greedy replies that are the same, token for token, as without a handover. Tokens: mean of "
        "those before the first difference. KL: divergence of the next token's distribution from that "
        "without a handover, in nats, at each position of that reply but the first; led along it, so that no "
        "position suffers from an earlier choice. Narrow, widen: ms per page of at most "
        f"{settings.page_bytes / 2**20:g} MiB in the cache's dtype; median (smallest..largest).",
        "payload",
        "bytes/token",
        "equal",
        "tokens",
        "KL mean",
        "KL p99",
        "KL worst",
        "narrow ms",
        "widen ms",
    )
    for form, measured in found.items():
        divergences = measured.divergences
        num_equal = sum(each.is_equal for each in measured.comparisons)
        made.table.add_row(
            form.value,
            f"{measured.bytes_per_token:,}",
            f"{num_equal} of {len(measured.comparisons)}",
            f"{measured.tokens_before_difference:.1f}",
            f"{statistics.fmean(divergences):.2g}",
            f"{percentile(divergences, 99):.2g}",
            f"{max(divergences):.2g}",
            str(spread(measured.narrow_s).scaled(1000)),
            str(spread(measured.widen_s).scaled(1000)),
        )
    return made


def result(settings: Settings, found: Found) -> dict[str, object]:
    """What the last line of stdout says."""
    figures: dict[str, object] = {"prompts": settings.prompts, "reply_tokens": settings.reply_tokens}
    for form, measured in found.items():
        divergences = measured.divergences
        figures |= {
            f"{form}_bytes_per_token": measured.bytes_per_token,
            f"{form}_equal_share": _short(measured.equal_share),
            f"{form}_tokens_before_difference": _short(measured.tokens_before_difference),
            f"{form}_kl_mean": _short(statistics.fmean(divergences)),
            f"{form}_kl_worst": _short(max(divergences)),
            f"{form}_narrow_ms": _short(statistics.median(measured.narrow_s) * 1000),
            f"{form}_widen_ms": _short(statistics.median(measured.widen_s) * 1000),
        }
    return figures | ({"quick": True} if settings.is_quick else {})


def _short(value: float) -> float:
    return float(f"{value:.4g}")
