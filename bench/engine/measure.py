"""The measurement, by turns: each round measures everything once, so that a slow minute hurts everybody."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from bench.engine.bandwidth import ReadBandwidth
from bench.engine.compare import Comparer
from bench.engine.contestant import Contestant
from bench.engine.ours import OurEngine
from bench.engine.rounds import FeaturesPoint, Round, SweepPoint
from bench.engine.settings import PEER_BATCH, Settings
from bench.engine.step_split import split_decode_steps
from bench.engine.workload import all_features, greedy, make_prompts, make_requests
from bench.loop_lag import summarize, watched_loop
from services.engine.precision import Precision

EXACT, FAST = "exact", "fast"  # our modes, by name


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds, and what the floor needs to know of the engine."""

    rounds: list[Round]
    kv_bytes_per_token: int


async def measure(settings: Settings, progress: Callable[[str], None]) -> Measured:
    """Runs every round. Raises BenchFailed for a result that is not what was asked for."""
    progress("loading")
    async with contextlib.AsyncExitStack() as stack:
        modes = [
            await stack.enter_async_context(_running(OurEngine(EXACT, settings, Precision.FP32))),
            await stack.enter_async_context(_running(OurEngine(FAST, settings, settings.precision))),
        ]
        contestants: list[Contestant] = [*modes]
        if settings.peers:
            from bench.engine.peers import Transformers

            peer = Transformers(settings, modes[0].config.max_batched_tokens)
            stack.callback(peer.close)
            contestants.append(peer)
        bandwidth = ReadBandwidth(settings.bandwidth_bytes)
        comparer = Comparer(settings, modes[0].vocab_size)
        progress("warming up")
        await comparer.warm_up(contestants)
        rounds = []
        for turn in range(settings.rounds):
            where = f"round {turn + 1} of {settings.rounds}"
            current = Round(bytes_per_s=bandwidth.measure())
            progress(f"{where}: decode steps by batch and context")
            current.sweep = await _sweep(settings, modes)
            progress(f"{where}: all sampling features")
            current.features = [await _features(settings, mode) for mode in modes]
            progress(f"{where}: {' and '.join(contestant.name for contestant in contestants)} by turns")
            current.comparisons = await comparer.compare(contestants, turn)
            rounds.append(current)
        return Measured(rounds, modes[0].cache.layout.bytes_per_token)


@contextlib.asynccontextmanager
async def _running(engine: OurEngine) -> AsyncIterator[OurEngine]:
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def _sweep(settings: Settings, modes: Sequence[OurEngine]) -> list[SweepPoint]:
    return [
        await _sweep_point(settings, mode, batch, context)
        for context in settings.contexts
        for batch in settings.batches
        for mode in modes
    ]


async def _sweep_point(settings: Settings, mode: OurEngine, batch: int, context: int) -> SweepPoint:
    """The prompts are the same in every round: only their first prefill is computed, into blocks of each
    sequence's own, and never timed."""
    prompts = make_prompts(batch, context, mode.vocab_size, f"sweep {context}")
    num_tokens = settings.sweep_tokens
    await mode.run(make_requests(prompts, [greedy(1)] * batch))
    run = await mode.run(make_requests(prompts, [greedy(num_tokens)] * batch))
    split = split_decode_steps(run.steps, batch, at_least=num_tokens // 2)
    return SweepPoint(mode=mode.name, batch=batch, context=context, split=split)


async def _features(settings: Settings, mode: OurEngine) -> FeaturesPoint:
    prompts = make_prompts(PEER_BATCH, settings.contexts[0], mode.vocab_size, f"sweep {settings.contexts[0]}")
    num_tokens = settings.sweep_tokens
    samplings = [all_features(num_tokens, row, mode.vocab_size) for row in range(PEER_BATCH)]
    await mode.run(make_requests(prompts, [greedy(1)] * PEER_BATCH))
    async with watched_loop() as late:
        run = await mode.run(make_requests(prompts, samplings))
    split = split_decode_steps(run.steps, PEER_BATCH, at_least=num_tokens // 2)
    return FeaturesPoint(mode=mode.name, split=split, lag=summarize(late))
