"""What the settings may call workers."""

import pytest

from gateway.routing.names import DnsName, WorkerNames, parse_entry


def test_addresses_and_names_are_told_apart_and_each_comes_once() -> None:
    entries = ("10.0.0.1:1", "dns:///decode.default.svc:50051", "[::1]:2", "10.0.0.1:1", "worker-0:3")
    names = WorkerNames.parse(entries)
    assert names.addresses == ("10.0.0.1:1", "[::1]:2", "worker-0:3")
    assert names.dns_names == (DnsName("decode.default.svc", 50051),)
    assert str(names.dns_names[0]) == "dns:///decode.default.svc:50051"


def test_a_host_may_be_called_like_the_prefix() -> None:
    assert parse_entry("dns:50051") == "dns:50051"


def test_a_name_may_be_absolute() -> None:
    absolute = "dns:///decode.default.svc.cluster.local.:50051"
    assert str(parse_entry(absolute)) == absolute


@pytest.mark.parametrize(
    "entry",
    [
        "nowhere",
        ":50051",
        "127.0.0.1:0",
        "127.0.0.1:70000",
        "127.0.0.1:http",
        "http://decode:80",
        "dns:decode:50051",
        "dns:0",
        "dns://10.96.0.10/decode:50051",
        "dns:///decode",
        "dns:///:50051",
        "dns:///decode:0",
        "dns:///-decode:1",
        "dns:///de code:1",
        "dns:///decode..svc:1",
        "dns:///[::1]:1",
        f"dns:///{'a' * 64}:1",
        f"dns:///{'.'.join(['a' * 60] * 5)}:1",
    ],
)
def test_a_bad_entry_is_told_what_to_write(entry: str) -> None:
    with pytest.raises(ValueError, match="write for example"):
        parse_entry(entry)
