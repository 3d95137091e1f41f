"""How exactly linear layers are computed on a CPU.

- `fp32` is exact: a row's result does not depend on its company. The default.
- `fp16` rounds the weights to 11 bits and multiplies in fp32; faster for small batches on any CPU with
  AVX2, since a decode step is bound by reading weights.
- `bf16` rounds weights and activations to 8 bits of mantissa; faster than fp32 for many rows where the CPU
  multiplies bf16 in hardware (AMX, AVX512-BF16), slower elsewhere.
- `fast` times all three on the model's own shapes at start and takes the quickest, or one for steps of few
  rows and another for larger ones where that pays for keeping the weights twice. A token may then be
  computed in another precision when its company grows.

Measured on the default model (SmolLM2-135M), greedy, 20 prompts with 64 tokens each, against fp32:

| | same token, running freely | after fp32's own tokens | relative error of logits, mean, largest |
|---|---|---|---|
| fp16 | 100% | 100% | 0.0008, 0.006 |
| bf16 | 61% | 98.3% | 0.013, 0.07 |
| fast | as the ones it takes | by the step's rows, so between those | as theirs |
| int8 weights and activations | 5% | 86% | 0.35, 2.1 |

So int8 is not offered. KV cache, norms and attention stay fp32 in all of them. On a GPU everything is bf16.
"""

from enum import StrEnum


class Precision(StrEnum):
    """The setting `BATON_PRECISION`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FAST = "fast"
