"""The arrangements that are compared, as processes: the same model, the same cores, the same threads in sum.

All of them run throughout, so that rounds can take turns; those that are not asked sit idle and cost
nothing. Each process is held to its cores from its first instruction on.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.interference.settings import CHUNK_TOKENS, NUM_CORES, Settings
from cli import ports
from cli.plan import Launch, Plan
from services.settings import WorkerSettings

_MAX_NUM_SEQS = 32
_DRAIN_S = "2"  # the streams are cut when a measurement ends: nobody waits for them


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Who is asked, and who computes the prompts.

    Attributes:
        name: as in the names of the figures.
        decode, prefill: names of processes; without the latter, decode computes prompts itself.
        hands_over: whether the KV cache goes to decode once it is computed.
    """

    name: str
    title: str
    decode: str
    prefill: str | None = None
    hands_over: bool = True

    @property
    def processes(self) -> tuple[str, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)


SPLIT = Arrangement("split", "split: prefill | decode", "decode-0", "prefill-0")
COLOCATED = Arrangement("colocated", "colocated", "decode-1")
CHUNKED = Arrangement("colocated_chunked", f"colocated, chunks of {CHUNK_TOKENS}", "decode-2")
# What two busy cores of one machine cost each other, with nothing of ours between them.
FLOOR = Arrangement("split_floor", "split, nothing handed over", "decode-0", "prefill-0", hands_over=False)


def arrangements(settings: Settings) -> tuple[Arrangement, ...]:
    """In the order in which they are printed."""
    return (SPLIT, COLOCATED, CHUNKED, FLOOR) if settings.floor else (SPLIT, COLOCATED, CHUNKED)


def make_plan(settings: Settings, cores: Sequence[int]) -> Plan:
    """The processes of all arrangements, on the first cores given. Needs `NUM_CORES` of them."""
    first, second = cores[:NUM_CORES]
    one, both = {"BATON_THREADS": "1"}, {"BATON_THREADS": str(NUM_CORES), "BATON_LOCAL_PREFILL": "always"}
    whole = _chunks_of(settings.prompt_tokens)
    addresses = [f"{ports.HOST}:{port}" for port in ports.pick(4)]
    return Plan(
        (
            _launch(settings, "prefill-0", addresses[0], (first,), one),
            _launch(settings, "decode-0", addresses[1], (second,), one | {"BATON_LOCAL_PREFILL": "never"}),
            _launch(settings, COLOCATED.decode, addresses[2], (first, second), both | whole),
            _launch(settings, CHUNKED.decode, addresses[3], (first, second), both | _chunks_of(CHUNK_TOKENS)),
        ),
        notices=(),
    )


def passed_on(environment: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """The caller's own settings of workers that the plan leaves as they are; they belong to the figures."""
    planned = {name for launch in plan.launches for name in launch.variables}
    ours = {f"BATON_{name.upper()}" for name in WorkerSettings.model_fields}
    return {name: environment[name] for name in sorted((ours - planned) & environment.keys())}


def _chunks_of(num_tokens: int) -> dict[str, str]:
    """Chunks of a prompt so large, and room in each step for a token of every other sequence."""
    return {
        "BATON_PREFILL_CHUNK": str(num_tokens),
        "BATON_MAX_BATCHED_TOKENS": str(num_tokens + _MAX_NUM_SEQS),
    }


def _launch(
    settings: Settings, name: str, address: str, cores: Sequence[int], variables: Mapping[str, str]
) -> Launch:
    module = f"services.{name.rpartition('-')[0]}"
    pinned = ("-m", "bench.interference.pinned", ",".join(map(str, cores)), module)
    own = {
        "BATON_MODEL": str(settings.model),
        "BATON_ENGINE": "hf",
        "BATON_DEVICE": "cpu",
        "BATON_PRECISION": settings.precision.value,
        "BATON_LISTEN": address,
        "BATON_MAX_NUM_SEQS": str(_MAX_NUM_SEQS),
        "BATON_DRAIN_S": _DRAIN_S,
        "OMP_NUM_THREADS": variables["BATON_THREADS"],
        "PYTHONUNBUFFERED": "1",
    }
    return Launch(name, address, (sys.executable, *pinned), own | dict(variables))
