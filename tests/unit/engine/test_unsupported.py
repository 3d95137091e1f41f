"""What cannot be served exactly is refused at start, with the reason; never served wrongly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from services.engine.config import EngineConfig
from services.engine.errors import UnsupportedModel
from services.engine.loop import HfEngine
from services.engine.sim_model import make_tokenizer
from tests.unit.engine.tiny_models import SHAPE, save_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
DELTA_NET = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")} | {
    f"linear_num_{name}_heads": 2 for name in ("key", "value")
}
QWEN_MOE = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DEEPSEEK = SHAPE | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MOE = {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1}


def save(folder: Path, family: str, **shape: Any) -> Path:
    """A folder with random weights of any family, and a tokenizer."""
    tokenizer = make_tokenizer()
    config = AutoConfig.for_model(family, **shape, vocab_size=tokenizer.get_vocab_size(), pad_token_id=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def start(folder: Path) -> HfEngine:
    return HfEngine(EngineConfig(model=folder, model_name="tiny", kv_memory_bytes=2**22))


def _drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _change_a_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(5, 5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _cut_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_drop_a_weight, "lacks weights: 1, "),
        (_change_a_shape, "cannot load"),
        (_cut_the_weights, "damaged or cut short"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot load"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "t5"}'), "encoder-decoder"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be read"),
    ],
)
def test_a_damaged_folder(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    damage(save_model(tmp_path))
    with pytest.raises(UnsupportedModel, match=reason):
        start(tmp_path)


@pytest.mark.parametrize(
    ("family", "shape", "reason"),
    [
        ("mamba", {"hidden_size": 48, "num_hidden_layers": 2, "state_size": 4}, "neither state-space"),
        ("rwkv", {"hidden_size": 48, "num_hidden_layers": 2, "context_length": 64}, "neither state-space"),
        ("qwen3_next", {**SHAPE, **QWEN_MOE, **DELTA_NET, "num_hidden_layers": 4}, "linear_attention"),
        ("lfm2", {**SHAPE, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96}, "conv"),
        # ALiBi: positions without a bound, and attention that knows no interface.
        ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4}, "ALiBi"),
        ("mpt", {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "ALiBi"),
        ("falcon", {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}, "interface"),
        (
            "bloom",
            {"hidden_size": 48, "n_layer": 2, "n_head": 4, "max_position_embeddings": 64},
            "interface",
        ),
        # Keys have another head size than the configuration says, or values another than keys.
        ("deepseek_v3", DEEPSEEK | {"v_head_dim": 16}, "cannot be paged"),
        ("deepseek_v3", DEEPSEEK | {"head_dim": 16, "v_head_dim": 8}, "cannot be paged"),
        ("bert", {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}, "equal"),
        # Chunks are longer than the self-test's prompt: only the layers' type tells.
        ("llama4_text", {**SHAPE, **MOE, "attention_chunk_size": 16}, "chunked_attention"),
    ],
)
def test_a_family_that_cannot_be_paged(
    tmp_path: Path, family: str, shape: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        start(save(tmp_path, family, **shape))


def test_longrope_ends_where_a_longer_neighbour_would_change_the_keys(tmp_path: Path) -> None:
    shape = {**SHAPE, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    engine = start(save(tmp_path, "phi3", **shape))
    assert engine.info.max_model_len == 64


def test_an_end_token_of_another_vocabulary_is_none(tmp_path: Path) -> None:
    engine = start(save(tmp_path, "llama", **SHAPE, eos_token_id=[1, 32_000]))
    assert engine.info.eos_token_ids == (1,)
