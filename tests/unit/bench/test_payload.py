"""`baton bench payload`: what it derives from known logits, and a quick run as it is typed."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.engine.workload import greedy
from bench.errors import BenchFailed
from bench.payload.comparison import compare
from bench.payload.handover import Page, go_on, prefill, run_here
from bench.payload.measure import Measured, measure
from bench.payload.prompts import make_prompts, texts
from bench.payload.report import result
from bench.payload.settings import Settings
from bench.payload.watch import Watch, watched_by
from cli import bench
from cli.errors import CommandError
from services.engine.request import EngineRequest
from services.kv.payload import PayloadFormat
from tests.unit.engine.tiny_models import running_engine, save_model

PROMPT = tuple(range(3, 40))


def logits(*odds: float) -> torch.Tensor:
    return torch.tensor(odds).log()


def test_a_reply_is_compared_up_to_its_first_other_token() -> None:
    expected = [logits(1, 3), logits(3, 1), logits(1, 1.5)]
    same = compare([0, 1, 0, 1], expected, expected)
    assert (same.num_before_difference, same.is_equal, same.divergences) == (4, True, [0, 0, 0])
    other = compare([0, 1, 0, 1], expected, [logits(1, 3), logits(1, 3), logits(1, 1.5)])
    assert (other.num_before_difference, other.is_equal) == (2, False)
    assert other.divergences == pytest.approx([0, 0.75 * math.log(3) - 0.25 * math.log(3), 0])


def test_a_reply_with_logits_missing_is_not_compared() -> None:
    with pytest.raises(BenchFailed, match="2 and 1 logits for a reply of 3"):
        compare([0, 1, 0], [logits(1, 3)] * 2, [logits(1, 3)])


def test_prompts_are_of_one_length_and_all_different(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(save_model(tmp_path) / "tokenizer.json"))
    settings = Settings(model=tmp_path, prompts=2 * len(texts()) + 1, prompt_tokens=1200)
    prompts = make_prompts(settings, tokenizer)
    assert {len(prompt) for prompt in prompts} == {1200}
    assert len(set(prompts)) == settings.prompts
    assert make_prompts(settings, tokenizer) == prompts
    with pytest.raises(BenchFailed, match="all texts together"):
        make_prompts(replace(settings, prompt_tokens=10**6), tokenizer)
    with pytest.raises(BenchFailed, match="two prompts are the same"):
        make_prompts(replace(settings, prompt_tokens=9), tokenizer)


def test_the_result_says_what_was_measured(tmp_path: Path) -> None:
    measured = Measured(100, narrow_s=[0.002, 0.004, 0.003], widen_s=[0.001])
    measured.comparisons += [
        compare([0, 1, 1], [logits(1, 3)] * 2, [logits(1, 3)] * 2),
        compare([0, 1, 1], [logits(1, 3)] * 2, [logits(3, 1), logits(1, 3)]),
    ]
    settings = Settings(model=tmp_path, prompts=2, reply_tokens=3)
    found = result(settings, {PayloadFormat.INT8: measured})
    assert found == {
        "prompts": 2,
        "reply_tokens": 3,
        "int8_bytes_per_token": 100,
        "int8_equal_share": 0.5,
        "int8_tokens_before_difference": 2.0,
        "int8_kl_mean": pytest.approx(0.5 * math.log(3) / 4, rel=1e-3),
        "int8_kl_worst": pytest.approx(0.5 * math.log(3), rel=1e-3),
        "int8_narrow_ms": 3.0,
        "int8_widen_ms": 1.0,
    }
    assert result(settings.quick(), {})["quick"] is True


async def test_what_is_read_off_a_led_reply_is_what_a_free_one_does(tmp_path: Path) -> None:
    """With a cache damaged more and more, until replies part."""
    watch = Watch()
    request = EngineRequest(request_id="r", prompt_token_ids=PROMPT, sampling=greedy(12))
    torch.manual_seed(0)
    async with running_engine(save_model(tmp_path), watched_by(watch), prefix_cache=False) as engine:
        watch.begin()
        reply = await run_here(engine, request)
        expected = watch.logits[1:]
        prefilled = await prefill(engine, engine.cache.layout, request, page_tokens=10)
        ranges = [(page.where.token_start, page.where.token_end) for page in prefilled.pages]
        assert ranges == [(0, 10), (10, 20), (20, 30), (30, 37)]
        seen = set()
        for noise in (0.0, 0.01, 0.1, 0.3, 1.0):
            pages = [
                Page(page.where, page.kv + noise * torch.randn_like(page.kv)) for page in prefilled.pages
            ]
            watch.begin(reply)
            assert await go_on(engine, request, prefilled.first_token, pages) == reply
            comparison = compare(reply, expected, watch.logits)
            watch.begin()
            free = await go_on(engine, request, prefilled.first_token, pages)
            parted = [ours != theirs for ours, theirs in zip(free, reply, strict=True)]
            assert comparison.num_before_difference == (parted.index(True) if True in parted else 12)
            assert comparison.is_equal is (free == reply)
            seen.add(comparison.is_equal)
        assert seen == {True, False}


async def test_a_model_that_cannot_hold_a_prompt_is_not_measured(tmp_path: Path) -> None:
    settings = Settings(model=save_model(tmp_path), prompt_tokens=500)
    with pytest.raises(BenchFailed, match="holds 512 tokens; 564 are needed"):
        await measure(settings, lambda _: None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quick": True, "prompts": 3}, "--quick has sizes"),
        ({"json_file": Path("nowhere/at/all.json")}, "--json: there is no folder"),
        ({"model": Path("none")}, "--model: none is not a model folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_first(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(CommandError, match=said):
        bench.payload(**{"model": tmp_path} | options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_quick_run_on_a_tiny_model(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    command = [sys.executable, "-m", "cli.main", "bench", "payload", "--quick"]
    command += ["--model", str(model), "--json", "run.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    document = json.loads((tmp_path / "run.json").read_text())
    assert document["result"] == found
    assert found["quick"] is True
    assert (found["exact_equal_share"], found["exact_kl_worst"]) == (1, 0)
    assert found["float16_kl_worst"] > 0
    assert found["int8_bytes_per_token"] == 3 * 2 * 2 * (8 + 4)
    assert len(document["formats"]["int8"]["comparisons"]) == 2
