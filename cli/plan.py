"""What a stack consists of: from the options of `baton up` to one launch per process.

A plan is plain values: it starts nothing, and it is what the supervisor restarts from. Each process
reads its settings from its environment; what the caller's environment holds passes through, and only
addresses, the model and what a flag says is laid over it.
"""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cli import ports
from cli.errors import CommandError
from cli.run_folder import MARKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What the user asked for."""

    prefill: int = 1
    decode: int = 1
    gateways: int = 1
    colocated: bool = False
    engine: str = "hf"
    port: int = 8000
    sim_prefill_ms_per_token: float = 0.0
    sim_token_ms: float = 33.0
    sim_jitter_ms: float = 8.0
    sim_seed: int = 42


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start: its command and the variables laid over the environment."""

    name: str  # <role>-<n>
    address: str
    command: tuple[str, ...]
    variables: dict[str, str]

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def marker(self) -> str:
        return MARKERS[self.role]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """Every process of a stack, in starting order, and what the user should be told."""

    launches: tuple[Launch, ...]
    notices: tuple[str, ...]


def make_plan(options: StackOptions, model: Path, environment: Mapping[str, str]) -> Plan:
    """Chooses addresses and settings for every process.

    Raises:
        CommandError: the options contradict each other, or a gateway's port is taken.
    """
    num_prefill = 0 if options.colocated else options.prefill
    if options.decode < 1 or options.gateways < 1 or options.prefill < 0:
        raise CommandError("a stack needs at least one decode worker and one gateway")
    ports.check_free(options.port, options.gateways)
    redis = _plan_redis(options, environment)
    free = ports.pick(num_prefill + options.decode)
    prefill = [f"{ports.HOST}:{port}" for port in free[:num_prefill]]
    decode = [f"{ports.HOST}:{port}" for port in free[num_prefill:]]
    shared = {"BATON_MODEL": str(model), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    worker = shared | {
        "BATON_ENGINE": options.engine,
        "BATON_THREADS": environment.get("BATON_THREADS", "1"),
        "BATON_LOCAL_PREFILL": _local_prefill(options, environment),
        "BATON_SIM_PREFILL_MS_PER_TOKEN": str(options.sim_prefill_ms_per_token),
        "BATON_SIM_TOKEN_MS": str(options.sim_token_ms),
        "BATON_SIM_JITTER_MS": str(options.sim_jitter_ms),
        "BATON_SIM_SEED": str(options.sim_seed),
    }
    gateway = shared | {
        "BATON_REDIS_URL": redis.url,
        "BATON_DECODE_WORKERS": ",".join(decode),
        "BATON_PREFILL_WORKERS": ",".join(prefill),
    }
    gateways = [f"{ports.HOST}:{options.port + n}" for n in range(options.gateways)]
    return Plan(
        (
            *redis.launches,
            *_launches("prefill", "services.prefill", prefill, worker),
            *_launches("decode", "services.decode", decode, worker),
            *_launches("gateway", "gateway", gateways, gateway),
        ),
        redis.notices,
    )


def _local_prefill(options: StackOptions, environment: Mapping[str, str]) -> str:
    if options.colocated or options.prefill == 0:
        return "always"
    return environment.get("BATON_LOCAL_PREFILL", "fallback")


def _launches(role: str, module: str, addresses: list[str], variables: dict[str, str]) -> list[Launch]:
    return [
        Launch(
            f"{role}-{n}",
            address,
            (sys.executable, "-m", module),
            variables | {"BATON_LISTEN": address},
        )
        for n, address in enumerate(addresses)
    ]


@dataclass(frozen=True, slots=True)
class _Redis:
    """The Redis of a stack: its URL (empty for none), what to start for it, what to say about it."""

    url: str
    launches: tuple[Launch, ...] = ()
    notices: tuple[str, ...] = ()


def _plan_redis(options: StackOptions, environment: Mapping[str, str]) -> _Redis:
    given = environment.get("BATON_REDIS_URL")
    if given:
        return _Redis(given, notices=("event log: the Redis of BATON_REDIS_URL",))
    binary = shutil.which("redis-server", path=environment.get("PATH"))
    if given is None and binary:
        address = f"{ports.HOST}:{ports.pick(1)[0]}"
        port = address.rpartition(":")[2]
        command = (binary, "--bind", ports.HOST, "--port", port, "--save", "", "--appendonly", "no")
        launch = Launch(
            "redis-0", address, (*command, "--dir", ".run", "--maxmemory-policy", "noeviction"), {}
        )
        return _Redis(f"redis://{address}/0", (launch,))
    why = "BATON_REDIS_URL is empty" if given == "" else "redis-server is not installed"
    if options.gateways > 1:
        raise CommandError(f"{why}: several gateways can share replies only through Redis")
    notice = f"event log: in memory, because {why}. Streams can be resumed only while this gateway lives"
    return _Redis("", notices=(notice,))
