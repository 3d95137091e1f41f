"""Loads a transformers model and reads its configuration; refuses what cannot be served, with the reason."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from services.engine import attention
from services.engine.errors import UnsupportedModel

IGNORES_INTERFACE = "its layers do not all go through transformers' attention interface"
_MAX_REASON_CHARS = 300  # transformers may list every class it knows
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}  # what `paged_attention` computes


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model, complete: transformers fills weights that a checkpoint lacks with random numbers."""
    try:
        if AutoConfig.from_pretrained(folder).is_encoder_decoder:
            raise UnsupportedModel("it is an encoder-decoder model; only decoder-only ones can be served")
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention.IMPLEMENTATION,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModel("it brings code of its own, which is never run") from error
        if isinstance(error, SafetensorError):
            raise UnsupportedModel(f"a .safetensors file is damaged or cut short: {error}") from error
        if attention.IMPLEMENTATION in error.args:  # looked up in a table of its own
            raise UnsupportedModel(IGNORES_INTERFACE) from error
        reason = str(error).partition("\n")[0][:_MAX_REASON_CHARS]
        raise UnsupportedModel(f"transformers cannot load it for causal generation: {reason}") from error
    if missing := sorted(loading["missing_keys"]):
        raise UnsupportedModel(f"its checkpoint lacks weights: {len(missing)}, {missing[0]} among them")
    use_linears(model)
    return model.eval()


def use_linears(model: torch.nn.Module) -> None:
    """GPT-2 and its kin keep their linear layers transposed, under a class of their own."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Conv1D):
                linear = torch.nn.Linear(1, 1)
                linear.in_features, linear.out_features = child.weight.shape
                weight = child.weight.detach().t().contiguous()
                linear.weight = torch.nn.Parameter(weight, requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)


def check_config(config: Any) -> None:
    """Refuses what is known from the configuration alone; `model_preparation` sees short prompts only."""
    needed = ("num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
    if missing := [name for name in needed if not hasattr(config, name)]:
        names = " and no ".join(missing)
        raise UnsupportedModel(
            f"its configuration has no {names}: neither state-space models nor ALiBi positions can be served"
        )
    if unknown := sorted({*(getattr(config, "layer_types", None) or ())} - _KNOWN_LAYER_TYPES):
        raise UnsupportedModel(f"its layers are of a type that cannot be paged: {', '.join(unknown)}")


def longest_context(config: Any) -> int:
    """Positions that one sequence may take.

    longrope turns all keys, also those in the cache, by other factors as soon as one position of a step
    lies past the original length; below it a token does not depend on its company.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [part for part in (rope, *rope.values()) if isinstance(part, dict)]  # by layer type, or one
    bounds = [
        part["original_max_position_embeddings"] for part in ropes if part.get("rope_type") == "longrope"
    ]
    return int(min([config.max_position_embeddings, *bounds]))


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Those that the model can say: some configurations keep another vocabulary's default."""
    config = model.config.get_text_config()
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = config.eos_token_id
    if found is None:
        return ()
    named = found if isinstance(found, list) else [int(found)]
    return tuple(token_id for token_id in named if 0 <= token_id < config.vocab_size)
