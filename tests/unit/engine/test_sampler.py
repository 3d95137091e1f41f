"""A token depends on its logits, parameters, seed, choice and position, and on nothing else."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from random import Random

import numpy as np
import pytest
import torch

from services.engine.request import NoToken, SamplingParams
from services.engine.sampler import Sampler, SampleRow, uniform
from services.engine.sampling_penalties import adjust
from tests.unit.engine import naive_sampling as naive
from tests.unit.engine.sampling import sample

VOCABULARY = 50
LOGITS = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2


def row(position: int = 7, prompt: int = 4, **sampling: object) -> SampleRow:
    params = SamplingParams(**{"max_tokens": 100, **sampling})  # type: ignore[arg-type]
    return SampleRow(params, 0, [i % VOCABULARY for i in range(position)], prompt, (3,))


def token(logits: torch.Tensor, where: SampleRow) -> int:
    return sample(logits, [where])[0].token_id


def test_greedy_takes_the_best() -> None:
    assert token(LOGITS, row()) == int(LOGITS.argmax())


def test_company_changes_nothing() -> None:
    rows = [row(position=5 + i, temperature=0.5 + i / 10, seed=i, top_p=0.9, top_k=20) for i in range(8)]
    rows[3] = row(position=9)
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(1))
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(8)]
    assert together == alone


def test_seed_choice_and_position_each_matter_and_nothing_else() -> None:
    base = uniform(1, 0, 10)
    assert base == uniform(1, 0, 10)
    assert len({base, uniform(2, 0, 10), uniform(1, 1, 10), uniform(1, 0, 11)}) == 4
    assert all(0 <= uniform(seed, 0, 1) < 1 for seed in range(1000))


def test_samples_follow_the_exact_probabilities() -> None:
    """Chi-square over 20,000 draws; the bound is the 99.99% quantile for 49 degrees of freedom (97.6)."""
    draws = 20_000
    rows = [row(temperature=1.0, seed=seed) for seed in range(draws)]
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    for start in range(0, draws, 1000):
        for sampled in sample(LOGITS.expand(1000, -1), rows[start : start + 1000]):
            counts[sampled.token_id] += 1
    expected = LOGITS[0].double().softmax(-1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 97.6


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 1.0}, 1),
    ],
)
def test_filters_keep_only_the_best(sampling: dict[str, object], allowed: int) -> None:
    best = set(LOGITS[0].topk(allowed).indices.tolist())
    seen = {token(LOGITS, row(temperature=3.0, seed=seed, **sampling)) for seed in range(200)}
    assert seen <= best
    assert len(seen) == allowed


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    seen = {token(logits, row(temperature=1.0, seed=seed, top_p=0.75)) for seed in range(300)}
    assert seen == {0, 1}


def test_logprobs_are_the_models_own() -> None:
    sampled = sample(LOGITS, [row(temperature=0.3, logprobs=5, presence_penalty=1.0)])[0]
    exact = LOGITS[0].double().log_softmax(-1)
    assert sampled.logprob == pytest.approx(float(exact[sampled.token_id]), abs=1e-4)
    assert [t for t, _ in sampled.top_logprobs] == exact.topk(5).indices.tolist()


def test_penalties_and_bias_move_tokens() -> None:
    best, second = LOGITS[0].topk(2).indices.tolist()
    assert token(LOGITS, row(logit_bias=((best, -100.0),))) == second
    repeated = replace(row(), token_ids=[0, best, best], num_prompt_tokens=1)
    assert token(LOGITS, replace(repeated, sampling=SamplingParams(frequency_penalty=50.0))) != best
    assert token(LOGITS, replace(repeated, sampling=SamplingParams(presence_penalty=50.0))) != best
    assert token(LOGITS, replace(repeated, sampling=SamplingParams(repetition_penalty=50.0))) != best
    in_prompt = replace(repeated, num_prompt_tokens=3)
    assert token(LOGITS, replace(in_prompt, sampling=SamplingParams(frequency_penalty=50.0))) == best


def test_min_tokens_bars_the_end() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3] = 50.0
    assert token(logits, row(position=7, prompt=4, min_tokens=4)) != 3
    assert token(logits, row(position=8, prompt=4, min_tokens=4)) == 3


@pytest.mark.parametrize("temperature", [1e-30, 1e-307, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    assert token(LOGITS, row(temperature=temperature)) == int(LOGITS.argmax())


def random_row(random: Random, vocab_size: int, **fixed: object) -> SampleRow:
    """A row with any mix of parameters, many of them off."""
    length = random.randrange(1, 60)
    choices: dict[str, tuple[object, ...]] = {
        "temperature": (0.0, 0.5, 0.8, 1.0, 2.0),
        "top_k": (0, 0, 1, 5, 50, vocab_size, 100_000),
        "top_p": (1.0, 1.0, 0.95, 0.5, 0.01),
        "min_p": (0.0, 0.0, 0.02, 0.5),
        "repetition_penalty": (1.0, 1.0, 1.1, 0.9),
        "presence_penalty": (0.0, 0.0, 0.2, -1.0),
        "frequency_penalty": (0.0, 0.0, 0.2, 3.0),
        "logit_bias": ((), ((vocab_size // 2, 3.0), (1, -100.0), (1, 50.0))),
        "logprobs": (None, None, 0, 5, 20),
        "min_tokens": (0, 100),
    }
    picked = {name: random.choice(values) for name, values in choices.items()} | fixed
    params = SamplingParams(seed=random.randrange(2**64), **picked)  # type: ignore[arg-type]
    token_ids = [random.randrange(vocab_size) for _ in range(length)]
    return SampleRow(
        params, random.randrange(4), token_ids, random.randrange(length + 1), (0, vocab_size - 1)
    )


@pytest.fixture(params=[1, 2])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("vocab_size", [3, 50, 1000, 1025, 40_001])
@pytest.mark.parametrize("batch", [1, 2, 5, 17])
def test_any_company_in_any_order_changes_nothing(vocab_size: int, batch: int) -> None:
    random = Random(vocab_size * 100 + batch)
    logits = torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(batch)) * 3
    rows = [random_row(random, vocab_size) for _ in range(batch)]
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(batch)]
    assert sample(logits, rows) == alone
    order = random.sample(range(batch), batch)
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    wide = torch.empty(batch, vocab_size + 7)[:, 3:-4].copy_(logits)  # neither contiguous nor aligned
    assert sample(wide, rows) == alone


def test_logits_are_not_changed() -> None:
    random = Random(1)
    logits = torch.randn(9, 3000)
    before = logits.clone()
    sample(logits, [random_row(random, 3000) for _ in range(9)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [3, 50, 3000])
def test_adjusted_logits_equal_a_loop_over_tokens(vocab_size: int) -> None:
    random = Random(vocab_size)
    for _ in range(100):
        row = random_row(random, vocab_size)
        logits = (torch.randn(vocab_size) * 3).numpy()
        prompt, generated = row.token_ids[: row.num_prompt_tokens], row.token_ids[row.num_prompt_tokens :]
        expected = naive.adjusted(
            logits.astype("float64"), row.sampling, prompt, generated, row.end_token_ids
        )
        adjust(
            logits,
            row.sampling,
            token_ids=row.token_ids,
            num_prompt_tokens=row.num_prompt_tokens,
            end_token_ids=row.end_token_ids,
        )
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-4)


def test_token_ids_may_be_an_array() -> None:
    random = Random(3)
    logits = torch.randn(20, 300)
    rows = [random_row(random, 300) for _ in range(20)]
    arrays = [replace(row, token_ids=array("q", row.token_ids)) for row in rows]
    assert sample(logits, arrays) == sample(logits, rows)


@pytest.mark.parametrize("vocab_size", [3, 50, 49_152])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_equal_a_log_softmax_in_fp64(vocab_size: int, count: int) -> None:
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(count)) * 3
    logits[0] = 1.0  # ties: the lower token first
    logits[1, 0] = 30.0
    logits[2, : vocab_size // 2] = -inf
    exact = logits.double().log_softmax(-1)
    for i, sampled in enumerate(sample(logits, [row(temperature=2.0, logprobs=count)] * 4)):
        finite = int(exact[i].isfinite().sum())
        best = logits[i].sort(descending=True, stable=True).indices.tolist()
        assert sampled.logprob == pytest.approx(exact[i, sampled.token_id].item(), abs=1e-4)
        assert [token for token, _ in sampled.top_logprobs] == best[: min(count, finite)]
        for token_id, logprob in sampled.top_logprobs:
            assert logprob == pytest.approx(exact[i, token_id].item(), abs=1e-4)
            assert logprob == sampled.logprob or token_id != sampled.token_id


def test_choices_differ_and_repeat_with_the_seed() -> None:
    def texts(seed: int) -> list[list[int]]:
        rows = [
            [replace(row(position=p, temperature=1.0, seed=seed), choice_index=i) for p in range(4, 40)]
            for i in range(8)
        ]
        return [[token(LOGITS, where) for where in choice] for choice in rows]

    assert texts(1) == texts(1)
    assert len({tuple(text) for text in texts(1) + texts(2)}) == 16


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.9}])
def test_a_barred_token_is_never_sampled(filters: dict[str, float]) -> None:
    logits = LOGITS.clone()
    logits[0, 3] = 50.0
    rows = [row(temperature=5.0, min_tokens=9, seed=seed, logprobs=1, **filters) for seed in range(300)]
    sampled = sample(logits.expand(300, -1), rows)
    assert all(chosen.token_id != 3 for chosen in sampled)
    assert all(chosen.top_logprobs[0][0] == 3 for chosen in sampled)  # the model's own, not what was barred


def test_duplicates_in_logit_bias_add_up() -> None:
    best, second = LOGITS[0].topk(2).indices.tolist()
    gap = float(LOGITS[0, best] - LOGITS[0, second])
    assert token(LOGITS, row(logit_bias=((second, gap * 0.6),))) == best
    assert token(LOGITS, row(logit_bias=((second, gap * 0.6), (second, gap * 0.6)))) == second


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [nan, inf])
def test_rows_without_a_best_token_say_so(temperature: float, bad: float) -> None:
    logits = torch.randn(4, VOCABULARY)
    logits[1, 7] = bad
    logits[3] = -inf
    tokens = Sampler(VOCABULARY).sample(logits, [row(temperature=temperature)] * 4)
    assert [token is NoToken.LOGITS for token in tokens] == [False, True, False, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_barring_the_only_token_left_leaves_none(temperature: float) -> None:
    logits = torch.full((1, VOCABULARY), -inf)
    logits[0, 3] = 0.0
    assert token(logits, row(temperature=temperature)) == 3
    assert Sampler(VOCABULARY).sample(logits, [row(temperature=temperature, min_tokens=9)]) == [
        NoToken.REQUEST
    ]


def test_a_penalty_or_a_bias_on_what_is_barred_leaves_it_barred() -> None:
    logits = torch.full((1, VOCABULARY), -inf)
    logits[0, 9] = -2.0
    biased = row(position=40, temperature=1.0, repetition_penalty=0.5, logit_bias=((4, 100.0),))
    assert token(logits, biased) == 9
