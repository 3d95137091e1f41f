"""Free ports on loopback, with real sockets."""

import socket
from collections.abc import Iterator

import pytest

from cli import ports
from cli.errors import CommandError


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((ports.HOST, 0)) as listener:
        yield listener.getsockname()[1]


def test_a_listening_port_is_not_free(taken: int) -> None:
    assert not ports.is_free(taken)


def test_picked_ports_differ_are_free_and_lie_below_the_kernels_own(taken: int) -> None:
    picked = ports.pick(50)
    assert len(set(picked)) == 50
    assert all(ports.is_free(port) and 20_000 <= port < 32_000 for port in picked)


def test_the_taken_port_is_named(taken: int) -> None:
    with pytest.raises(CommandError, match=f"port {taken} is in use.*--port"):
        ports.check_free(taken, 1)


def test_a_range_names_the_port_that_is_in_the_way(taken: int) -> None:
    with pytest.raises(CommandError, match=f"port {taken} is in use .the gateways need"):
        ports.check_free(taken - 1, 2) if ports.is_free(taken - 1) else ports.check_free(taken, 2)


def test_there_is_no_port_beyond_the_last() -> None:
    with pytest.raises(CommandError, match="port 65536"):
        ports.check_free(65536, 1)
