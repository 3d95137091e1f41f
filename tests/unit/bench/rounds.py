"""Rounds with made-up figures, for what is derived from them."""

from dataclasses import replace
from pathlib import Path

from bench.engine.figures import PEER, Figures
from bench.engine.floor import WeightCount
from bench.engine.measure import EXACT, FAST, Measured
from bench.engine.rounds import Comparison, FeaturesPoint, Round, SweepPoint
from bench.engine.settings import Settings
from bench.engine.step_split import StepSplit
from bench.loop_lag import LoopLag

SETTINGS = Settings(model=Path("tiny"), rounds=3, batches=(1, 16), contexts=(100,), prefills=(256,))
SPEED = {EXACT: 1.0, FAST: 2.0, PEER: 0.5}


def make_split(step_s: float) -> StepSplit:
    """A tenth of the step is overhead."""
    return StepSplit(
        num_steps=20,
        forward_s=0.9 * step_s,
        sampling_s=0.05 * step_s,
        detokenizing_s=0.02 * step_s,
        scheduling_s=0.03 * step_s,
    )


def make_comparison(name: str, slowdown: float) -> Comparison:
    speed = SPEED[name] / slowdown
    return Comparison(
        name=name,
        step_s=0.04 / speed,
        decode_tokens_per_s=100 * speed,
        run_tokens_per_s=50 * speed,
        prefill_s={256: 0.5 / speed},
        single_replies=((1, 2, 3),),
        batch_replies=((1, 2), (3, 4 if name == FAST else 5)),
    )


def make_round(slowdown: float, *, peers: bool = True) -> Round:
    """A machine that was `slowdown` times slower meanwhile, for everybody."""
    made = Round(bytes_per_s=20e9 / slowdown)
    for mode in (EXACT, FAST):
        step_s = 0.04 * slowdown / SPEED[mode]
        made.sweep += [
            SweepPoint(mode=mode, batch=batch, context=100, split=make_split(step_s)) for batch in (1, 16)
        ]
        lag = LoopLag(num_sleeps=100, p50_s=0.0001, p99_s=0.002 * slowdown, max_s=0.01)
        made.features.append(FeaturesPoint(mode=mode, split=make_split(step_s), lag=lag))
    names = [EXACT, FAST, PEER] if peers else [EXACT, FAST]
    made.comparisons = {name: make_comparison(name, slowdown) for name in names}
    return made


def make_figures(*, peers: bool = True) -> Figures:
    """Three rounds, of which the second met a machine half as fast."""
    settings = SETTINGS if peers else replace(SETTINGS, peers=False)
    rounds = [make_round(slowdown, peers=peers) for slowdown in (1.0, 2.0, 1.0)]
    weights = WeightCount(linear=100_000_000, other=1_000_000)
    return Figures(settings, Measured(rounds, kv_bytes_per_token=46_080), weights)
