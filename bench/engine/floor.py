"""The least time that a decode step can take: reading what it must read, at the memory's bandwidth.

    floor = (bytes of weights + bytes of active KV) / measured bandwidth

Weights: those of linear layers in the width of the engine's precision, norms and biases in fp32. `fast`
counts as 2 bytes, the narrowest that it may choose for a layer: the floor is then the lowest it could be.
An embedding table is looked up by row and not counted; the output head is read whole, tied or not. KV:
keys and values of the tokens in the context, every layer, as wide as the cache keeps them.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.engine.model_loading import use_linears
from services.engine.precision import Precision

_FP32_BYTES = 4
_LINEAR_BYTES = {Precision.FP32: 4, Precision.BF16: 2, Precision.FP16: 2, Precision.FAST: 2}


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Numbers that one decode step reads."""

    linear: int
    other: int

    def num_bytes(self, precision: Precision) -> int:
        return self.linear * _LINEAR_BYTES[precision] + self.other * _FP32_BYTES


def count_weights(folder: Path) -> WeightCount | None:
    """From the model's configuration; None for a mixture of experts, which reads what the token chose."""
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts")):
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        use_linears(model)
        return count_module(model)


def count_module(model: nn.Module) -> WeightCount:
    """Every linear layer's weight, shared or not, and what else is no embedding table."""
    linears = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    counted = {id(weight) for weight in (*linears, *tables)}
    others = (weight.numel() for weight in model.parameters() if id(weight) not in counted)
    return WeightCount(linear=sum(weight.numel() for weight in linears), other=sum(others))


def floor_s(weight_bytes: int, kv_bytes: float, bytes_per_s: float) -> float:
    """Seconds of one step."""
    return (weight_bytes + kv_bytes) / bytes_per_s
