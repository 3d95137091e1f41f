"""From options to launches: addresses, settings and notices, and what the workers make of them."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.errors import CommandError
from cli.plan import Launch, Plan, StackOptions, make_plan
from cli.ports import HOST
from tests.e2e.stack import free_ports

MODEL = Path("/models/a")


@pytest.fixture
def with_redis(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH holds a redis-server; planning only looks for it."""
    binary = tmp_path / "redis-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return {"PATH": str(tmp_path)}


def plan_of(environment: dict[str, str], **options: object) -> Plan:
    port = free_ports(4)
    return make_plan(StackOptions(port=port, **options), MODEL, environment)  # type: ignore[arg-type]


def by_name(plan: Plan) -> dict[str, Launch]:
    return {launch.name: launch for launch in plan.launches}


def test_the_default_stack(with_redis: dict[str, str]) -> None:
    plan = plan_of(with_redis)
    assert [launch.name for launch in plan.launches] == ["redis-0", "prefill-0", "decode-0", "gateway-0"]
    assert plan.notices == ()
    launches = by_name(plan)
    gateway = launches["gateway-0"].variables
    assert gateway["BATON_REDIS_URL"] == f"redis://{launches['redis-0'].address}/0"
    assert gateway["BATON_DECODE_WORKERS"] == launches["decode-0"].address
    assert gateway["BATON_PREFILL_WORKERS"] == launches["prefill-0"].address
    for launch in plan.launches[1:]:
        assert launch.variables["BATON_LISTEN"] == launch.address
        assert launch.variables["BATON_MODEL"] == str(MODEL)
        assert launch.address.startswith(f"{HOST}:")
        assert launch.marker in launch.command
        assert launch.variables["OMP_NUM_THREADS"] == "1"


def test_everything_listens_on_loopback_and_nowhere_twice(with_redis: dict[str, str]) -> None:
    plan = plan_of(with_redis, prefill=3, decode=4, gateways=2)
    addresses = [launch.address for launch in plan.launches]
    assert len(set(addresses)) == len(addresses) == 10
    assert {address.rpartition(":")[0] for address in addresses} == {HOST}
    assert "--bind" in plan.launches[0].command


def test_gateways_take_adjacent_ports(with_redis: dict[str, str]) -> None:
    port = free_ports(3)
    launches = by_name(make_plan(StackOptions(gateways=3, port=port), MODEL, with_redis))
    assert [launches[f"gateway-{n}"].address for n in range(3)] == [f"{HOST}:{port + n}" for n in range(3)]


@pytest.mark.parametrize("options", [{"colocated": True}, {"prefill": 0}])
def test_without_prefill_workers_decode_runs_prompts(
    with_redis: dict[str, str], options: dict[str, object]
) -> None:
    launches = by_name(plan_of(with_redis, **options))
    assert "prefill-0" not in launches
    assert launches["decode-0"].variables["BATON_LOCAL_PREFILL"] == "always"
    assert launches["gateway-0"].variables["BATON_PREFILL_WORKERS"] == ""


def test_the_callers_choice_of_local_prefill_stands(with_redis: dict[str, str]) -> None:
    launches = by_name(plan_of({**with_redis, "BATON_LOCAL_PREFILL": "never"}))
    assert launches["decode-0"].variables["BATON_LOCAL_PREFILL"] == "never"


def test_simulation_flags_reach_the_workers(with_redis: dict[str, str]) -> None:
    flags = {"sim_prefill_ms_per_token": 1.5, "sim_token_ms": 2.0, "sim_jitter_ms": 0.5, "sim_seed": 7}
    variables = by_name(plan_of(with_redis, engine="sim", **flags))["decode-0"].variables
    assert variables["BATON_ENGINE"] == "sim"
    assert [variables[f"BATON_{name.upper()}"] for name in flags] == ["1.5", "2.0", "0.5", "7"]


def test_a_given_redis_is_used_and_none_started() -> None:
    plan = plan_of({"PATH": "", "BATON_REDIS_URL": "redis://10.0.0.1:6379/3"})
    assert "redis-0" not in by_name(plan)
    assert by_name(plan)["gateway-0"].variables["BATON_REDIS_URL"] == "redis://10.0.0.1:6379/3"
    assert plan.notices


@pytest.mark.parametrize("environment", [{"PATH": "/nowhere"}, {"BATON_REDIS_URL": ""}])
def test_without_redis_the_notice_says_what_that_means(
    with_redis: dict[str, str], environment: dict[str, str]
) -> None:
    plan = plan_of({**with_redis, **environment})
    assert "redis-0" not in by_name(plan)
    assert "in memory" in plan.notices[0]
    with pytest.raises(CommandError, match="Redis"):
        plan_of({**with_redis, **environment}, gateways=2)


@pytest.mark.parametrize("options", [{"decode": 0}, {"gateways": 0}, {"prefill": -1}])
def test_impossible_stacks(with_redis: dict[str, str], options: dict[str, object]) -> None:
    with pytest.raises(CommandError):
        plan_of(with_redis, **options)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener.getsockname()[1]


def test_a_taken_gateway_port_is_named(with_redis: dict[str, str], taken: int) -> None:
    with pytest.raises(CommandError, match=str(taken)):
        make_plan(StackOptions(port=taken), MODEL, with_redis)


def test_a_launch_survives_the_pipe_to_the_supervisor(with_redis: dict[str, str]) -> None:
    launch = plan_of(with_redis).launches[1]
    fields = launch.to_json()
    assert Launch(fields["name"], fields["address"], tuple(fields["command"]), fields["variables"]) == launch  # type: ignore[arg-type]
