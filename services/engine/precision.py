"""How exactly linear layers are computed on a CPU.

- `fp32` is exact: a row's result does not depend on its company. The default.
- `bf16` rounds weights and activations to 8 bits of mantissa (relative error about 2e-3 at the head);
  several times faster where the CPU multiplies bf16 in hardware (AMX, AVX512-BF16), slower elsewhere.
- `fp16` rounds the weights to 11 bits (about 2e-4) and multiplies in fp32; faster for small batches on
  any AVX2 CPU, since a decode step is bound by reading weights.
- `fast` times all three on the model's own shapes at start and takes the quickest.

KV cache, norms and attention stay fp32 in all of them.
"""

from enum import StrEnum


class Precision(StrEnum):
    """The setting `BATON_PRECISION`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FAST = "fast"
