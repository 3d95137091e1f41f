"""What a decode step must read, and how long that takes at least."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from bench.engine.floor import WeightCount, count_module, count_weights, floor_s
from services.engine.model_loading import load_model
from services.engine.precision import Precision
from tests.unit.engine.tiny_models import save_model


def test_the_formula() -> None:
    # Weights of 269 MB and 6.5 MB of KV at 20 GB/s.
    assert floor_s(269_000_000, 6_500_000, 20e9) == pytest.approx(0.013775)


def test_linear_weights_have_the_precisions_width_and_the_rest_is_fp32() -> None:
    count = WeightCount(linear=1000, other=10)
    assert count.num_bytes(Precision.FP32) == 4040
    assert {count.num_bytes(p) for p in (Precision.FP16, Precision.BF16, Precision.FAST)} == {2040}


def test_every_precision_has_a_width() -> None:
    for precision in Precision:
        assert WeightCount(linear=1, other=0).num_bytes(precision) > 0


def test_a_tied_head_is_read_whole_and_a_table_is_not() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(50, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 50)})
    assert count_module(model) == WeightCount(linear=400, other=8 + 8 + 50)
    model["head"].weight = model["table"].weight
    assert count_module(model) == WeightCount(linear=400, other=8 + 8 + 50)


def test_a_saved_model_is_counted_from_its_configuration(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_model(tmp_path_factory.mktemp("llama"))
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    attention = 48 * (48 + 16 + 16 + 48)  # q, k, v, o: 6 heads and 2 KV heads of 8
    layer = attention + 3 * 48 * 96
    assert count_weights(folder) == WeightCount(linear=3 * layer + 48 * vocabulary, other=(2 * 3 + 1) * 48)


def test_layers_of_another_class_are_counted_as_the_linears_that_serve_them(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save_model(tmp_path_factory.mktemp("gpt2"), "gpt2")
    model = load_model(folder, torch.float32)
    assert count_weights(folder) == count_module(model)


def test_a_mixture_of_experts_has_no_floor(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert count_weights(save_model(tmp_path_factory.mktemp("mixtral"), "mixtral")) is None
