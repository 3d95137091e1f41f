"""What a run prints before the RESULT line, and that line."""

import json
from collections.abc import Iterator, Mapping

from bench.statistics import Spread, spread
from bench.topic import Topic, make_topic
from bench.transfer.measure import (
    FLOAT16,
    GRPC,
    INT8,
    RAW_ASYNCIO,
    RAW_THREADED,
    SHARED,
    TCP,
    WAYS,
    Bulk,
    Overlap,
)
from bench.transfer.settings import Settings

_TITLES = {
    RAW_ASYNCIO: "bare gRPC stream, asyncio client",
    RAW_THREADED: "bare gRPC stream, threaded client",
    GRPC: "Baton, in gRPC messages",
    FLOAT16: "Baton, in gRPC messages as float16",
    INT8: "Baton, in gRPC messages as int8",
    TCP: "Baton, on a TCP connection beside gRPC",
    SHARED: "Baton, through shared memory",
}


def topics(bulk: Bulk, overlaps: Mapping[int, Overlap]) -> Iterator[Topic]:
    """In the order in which they are printed."""
    yield _bulk(bulk)
    yield _overlap(overlaps)


def fraction_of_raw(bulk: Bulk, way: str) -> Spread:
    """Of the faster client's rate in the same round."""
    fastest = map(max, zip(bulk.rates[RAW_ASYNCIO], bulk.rates[RAW_THREADED], strict=True))
    return spread(ours / raw for ours, raw in zip(bulk.rates[way], fastest, strict=True))


def result_line(settings: Settings, bulk: Bulk, overlaps: Mapping[int, Overlap]) -> str:
    """The last line of stdout; `quick` where nothing was measured."""
    fraction, tcp = fraction_of_raw(bulk, GRPC), fraction_of_raw(bulk, TCP)
    found: dict[str, object] = {"quick": True} if settings.is_quick else {}
    found |= {
        "grpc_fraction_of_raw": _short(fraction.median),
        "grpc_fraction_of_raw_range": [_short(fraction.low), _short(fraction.high)],
        "tcp_fraction_of_raw": _short(tcp.median),
        "tcp_fraction_of_raw_range": [_short(tcp.low), _short(tcp.high)],
        "shm_gb_s": _short(spread(bulk.rates[SHARED]).median / 1e9),
        "shm_fraction_of_raw": _short(fraction_of_raw(bulk, SHARED).median),
    }
    for length, overlap in overlaps.items():
        share = spread(overlap.shares())
        found[f"critical_path_share_{length}"] = _short(share.median)
        found[f"critical_path_share_{length}_range"] = [_short(share.low), _short(share.high)]
    found |= {f"{way}_gb_s": _short(spread(bulk.rates[way]).median / 1e9) for way in WAYS}
    return "RESULT " + json.dumps(found)


def _bulk(bulk: Bulk) -> Topic:
    topic = make_topic(
        f"{bulk.num_bytes / 1e6:.0f} MB of KV cache in {bulk.num_messages} messages, from process to process",
        "Request sent to last page verified and written to its block, its prompt computed before. Median of "
        "the rounds (smallest..largest). The bare stream's messages are as large and as many, lie ready in "
        "memory, each in its own, and are only counted; its channel has the options of Baton's. Of the bare "
        "stream: against its faster client in the same round.",
        "",
        "GB/s of cache",
        "of the bare stream",
    )
    for way in WAYS:
        rate = spread(bulk.rates[way]).scaled(1e-9)
        topic.table.add_row(_TITLES[way], str(rate), str(fraction_of_raw(bulk, way)))
    return topic


def _overlap(overlaps: Mapping[int, Overlap]) -> Topic:
    topic = make_topic(
        "What is left of the transfer when the first token is known, in gRPC messages",
        "Left: first token in hand to last page verified. Whole: the same bytes from a worker that has "
        "nothing to compute. Share: left / whole of the same round. Prefill: request sent to first token in "
        "hand. "
        "Nothing of the prompt is in a prefix cache.",
        "prompt tokens",
        "MB",
        "prefill, s",
        "whole, ms",
        "left, ms",
        "share",
    )
    for length, overlap in overlaps.items():
        topic.table.add_row(
            f"{length:,}",
            f"{overlap.num_bytes / 1e6:.0f}",
            str(spread(overlap.prefill_s)),
            str(spread(overlap.whole_s).scaled(1000)),
            str(spread(overlap.left_s).scaled(1000)),
            str(spread(overlap.shares())),
        )
    return topic


def _short(value: float) -> float:
    return float(f"{value:.4g}")
