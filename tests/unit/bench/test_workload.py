"""Prompts come from seeds; requests pass the engine's own check."""

from itertools import combinations

from bench.engine.workload import all_features, greedy, make_prompts, make_requests
from services.engine.request import SamplingParams


def test_the_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    prompts = make_prompts(16, 128, 1000, "a")
    assert prompts == make_prompts(16, 128, 1000, "a")
    assert [len(prompt) for prompt in prompts] == [128] * 16
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    everything = prompts + make_prompts(16, 128, 1000, "b")
    assert all(a[:16] != b[:16] for a, b in combinations(everything, 2)), "a prefix cache could help"


def test_a_smaller_batch_asks_the_beginning_of_a_larger_one() -> None:
    assert make_prompts(4, 32, 1000, "a") == make_prompts(16, 32, 1000, "a")[:4]


def test_every_feature_is_on() -> None:
    sampling = all_features(24, row=3, vocab_size=1000)
    off = SamplingParams()
    same = {name for name in sampling.__dataclass_fields__ if getattr(sampling, name) == getattr(off, name)}
    assert same == {"stop_token_ids", "ignore_eos", "include_stop"}
    assert sampling.max_tokens == sampling.min_tokens == 24
    assert all_features(24, row=4, vocab_size=1000).seed != sampling.seed


def test_one_request_a_prompt() -> None:
    prompts = make_prompts(2, 8, 1000, "a")
    requests = make_requests(prompts, [greedy(5)] * 2)
    assert [request.prompt_token_ids for request in requests] == prompts
    assert all(request.sampling.ignore_eos and request.sampling.max_tokens == 5 for request in requests)
