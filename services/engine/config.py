"""What an engine is built from. Frozen; parsed from the environment elsewhere (`services/settings.py`)."""

from dataclasses import dataclass
from pathlib import Path

from services.engine.device import Device
from services.engine.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine. Sizes in tokens unless said otherwise.

    Args:
        model: a Hugging Face folder.
        model_name: what clients call it.
        max_model_len: prompt and reply together; None takes the model's own bound.
        max_batched_tokens: token budget of one step, over all sequences; at least `max_num_seqs`.
        prefill_chunk: most tokens of one prompt in one step.
        share_kv: whether other processes of this host may map the KV pool, to read it; on a CPU.
        prefix_cache: whether sequences use what earlier ones have computed for the same tokens.
        threads: torch threads of the process.
        precision: of the linear layers, on a CPU.
        device: where the model runs; on a GPU everything is bf16.
    """

    model: Path
    model_name: str
    block_size: int = 16
    kv_memory_bytes: int = 1024**3
    max_num_seqs: int = 32
    max_queue_len: int = 256
    max_batched_tokens: int = 512
    prefill_chunk: int = 256
    max_model_len: int | None = None
    prefix_cache: bool = True
    share_kv: bool = False
    threads: int = 1
    precision: Precision = Precision.FP32
    device: Device = Device.CPU
    sim_prefill_ms_per_token: float = 0.0
    sim_token_ms: float = 33.0
    sim_jitter_ms: float = 8.0
    sim_seed: int = 42

    def __post_init__(self) -> None:
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_batched_tokens is below max_num_seqs: some sequences would never have a turn"
            )
