"""Channels and the transport options of both ends, with the reasons in one place.

- A peer that is killed shows as UNAVAILABLE at once; one that is stopped or behind a black hole
  shows only through unanswered pings (`Pings`). gRPC needs `ping_timeout_ms` beside the keepalive
  settings for that, else it waits for over half a minute (measured).
- Pings flow without calls too, since a decode worker's channel to prefill may idle between prompts;
  servers therefore permit them and strike nobody.
- Pages are 2 MB, the fastest size measured on loopback with all that is done to a page (512 kB: two thirds
  as fast; a bare stream is fastest at 1 MB); the limit stands at twice that, on purpose, on both ends.
- Frames and reads are as large as half a page: a quarter less CPU for the receiver than with gRPC's 16 kB.
- At most half a page of a call is under way at once. gRPC would measure the link and allow several MB, which
  on a slow one are seconds: the first token would queue behind pages, and so would the answer to a ping,
  which is then taken for silence although bytes arrive all the time (seen at 1 MB/s with 6 MB and more).
  On loopback pages move as fast either way.
- Connections have no maximum age: calls last as long as replies do, and draining is what moves them.
- A worker that comes back is dialled again within a second: the default backoff grows to minutes. What
  gRPC calls the minimal reconnect backoff is how long an attempt to connect may take; one that is refused
  fails at once all the same. At 100 ms a busy machine could look like a dead one (seen).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grpc import aio

MAX_MESSAGE_BYTES = 4 * 1024 * 1024 + 64 * 1024
_MAX_BYTES_UNDER_WAY = 1024 * 1024
_FRAME_BYTES = 1024 * 1024
_CONNECT_MS = 2_000

Options = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Pings:
    """When a peer that says nothing counts as gone: `timeout_s` after a ping, the next of which goes out
    within `every_s`. Also how long a worker may keep blocks for a caller that has gone silent.
    """

    every_s: float = 2.0
    timeout_s: float = 4.0


DEFAULT_PINGS = Pings()

_BOTH_ENDS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

_CLIENT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _MAX_BYTES_UNDER_WAY),
    ("grpc.http2.max_frame_size", _FRAME_BYTES),
    ("grpc.experimental.tcp_read_chunk_size", _FRAME_BYTES),
    ("grpc.experimental.tcp_min_read_chunk_size", _FRAME_BYTES),
    ("grpc.experimental.tcp_max_read_chunk_size", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # workers are neighbours; a proxy variable must not catch them
)

_SERVER = (
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two workers on one port is a mistake, not load balancing
)


def server_options(pings: Pings = DEFAULT_PINGS) -> Options:
    """For `aio.server`."""
    return (*_keepalive(pings), *_BOTH_ENDS, *_SERVER)


def channel_options(pings: Pings = DEFAULT_PINGS) -> Options:
    """For the other end."""
    return (*_keepalive(pings), *_BOTH_ENDS, *_CLIENT)


def create_channel(
    target: str, interceptors: Sequence[aio.ClientInterceptor] = (), *, pings: Pings = DEFAULT_PINGS
) -> aio.Channel:
    """An insecure channel to `host:port`. It connects lazily and reconnects by itself."""
    # With gRPC's default scheme spelled out, for it takes a host that is called `dns` or `unix` for one.
    return aio.insecure_channel(
        f"dns:///{target}", options=channel_options(pings), interceptors=list(interceptors)
    )


def _keepalive(pings: Pings) -> Options:
    every_ms, timeout_ms = round(pings.every_s * 1000), round(pings.timeout_s * 1000)
    return (
        ("grpc.keepalive_time_ms", every_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )
