"""What the settings may call a worker: `host:port`, or a DNS name that stands for many.

`dns:///name:port` is gRPC's own spelling of such a target. Nothing here looks anything up.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

DNS_PREFIX = "dns:///"

_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name whose addresses are the workers, all on one port."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"{DNS_PREFIX}{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class WorkerNames:
    """The setting's entries by kind, each once and in their order."""

    addresses: tuple[str, ...]
    dns_names: tuple[DnsName, ...]

    @classmethod
    def parse(cls, entries: Sequence[str]) -> "WorkerNames":
        """Raises ValueError, which says what to write instead."""
        distinct = [parse_entry(entry) for entry in dict.fromkeys(entries)]
        return cls(
            tuple(entry for entry in distinct if isinstance(entry, str)),
            tuple(entry for entry in distinct if isinstance(entry, DnsName)),
        )


def parse_entry(entry: str) -> str | DnsName:
    """One entry. Raises ValueError, which says what to write instead."""
    is_dns = entry.startswith("dns:") and not entry.removeprefix("dns:").isdigit()  # a host may be called so
    if is_dns and not entry.startswith(DNS_PREFIX):
        raise ValueError(f"{entry!r} is no DNS entry; write for example {DNS_PREFIX}decode:50051")
    rest = entry.removeprefix(DNS_PREFIX)
    host, _, port = rest.rpartition(":")
    if not (port.isascii() and port.isdigit()) or not 0 < int(port) <= 65535:
        example = f"{DNS_PREFIX}decode:50051" if is_dns else "127.0.0.1:50051"
        raise ValueError(f"{entry!r} has no port from 1 to 65535; write for example {example}")
    if not is_dns:
        if not host or "/" in host:
            raise ValueError(
                f"{entry!r} is neither host:port nor {DNS_PREFIX}name:port; write for example "
                f"127.0.0.1:50051, or {DNS_PREFIX}decode:50051 for every address behind a name"
            )
        return entry
    if not _NAME.fullmatch(host) or len(host) > 253:
        raise ValueError(
            f"{entry!r} holds no DNS name; write for example {DNS_PREFIX}decode.default.svc:50051, "
            "and an address without the prefix"
        )
    return DnsName(host, int(port))
