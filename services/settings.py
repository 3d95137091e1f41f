"""Settings of a worker process: what each `BATON_*` variable may be; `environment.py` reads them."""

from enum import StrEnum
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from services.engine.device import Device
from services.engine.precision import Precision
from services.environment import Address, ProcessSettings
from services.kv.payload import PayloadFormat


class LocalPrefill(StrEnum):
    """When a decode worker may run a fresh prompt on its own model."""

    NEVER = "never"  # only prefill workers do
    FALLBACK = "fallback"  # when no prefill worker answers, and for prompts below the threshold
    ALWAYS = "always"  # colocated: there are no prefill workers


class KvTransport(StrEnum):
    """How pages reach a decode worker."""

    AUTO = "auto"  # through shared memory where both ends are processes of one host, else as tcp
    TCP = "tcp"  # on a connection of their own, named in gRPC messages; as grpc where there is none
    GRPC = "grpc"  # in gRPC messages


class EngineKind(StrEnum):
    """Which engine computes."""

    HF = "hf"
    SIM = "sim"


class WorkerSettings(ProcessSettings):
    """One prefill or decode process."""

    listen: Address = "127.0.0.1:0"
    model: Path = Field(description="folder of a Hugging Face model")
    model_name: str = ""  # empty: the folder's name
    engine: EngineKind = EngineKind.HF
    local_prefill: LocalPrefill = LocalPrefill.FALLBACK
    local_prefill_max_tokens: int = Field(0, ge=0)  # tokens to compute, beyond the cached ones
    kv_memory_mb: int = Field(1024, ge=1)
    block_size: int = Field(16, ge=1, le=1024)
    max_num_seqs: int = Field(32, ge=1)
    max_queue_len: int = Field(256, ge=0)
    max_batched_tokens: int = Field(512, ge=1, validate_default=True)
    prefill_chunk: int = Field(256, ge=1)
    max_model_len: int = Field(0, ge=0)  # 0: the model's own
    prefix_cache: bool = True
    precision: Precision = Precision.FP32  # of linear layers; fp32 is exact
    device: Device = Device.AUTO
    threads: int = Field(1, ge=1)  # per process: two stall each other on shared cores
    max_page_bytes: int = Field(2 * 1024 * 1024, ge=1024, le=4 * 1024 * 1024)
    kv_transport: KvTransport = KvTransport.AUTO
    kv_payload: PayloadFormat = PayloadFormat.EXACT  # decode: of pages in messages and on data connections
    kv_port: int = Field(0, ge=0, le=65535)  # prefill: of data connections; 0 takes a free one
    drain_s: float = Field(25.0, ge=0)
    sim_prefill_ms_per_token: float = Field(0.0, ge=0)
    sim_token_ms: float = Field(33.0, ge=0)
    sim_jitter_ms: float = Field(8.0, ge=0)
    sim_seed: int = 42

    @field_validator("model")
    @classmethod
    def _is_folder(cls, value: Path) -> Path:
        if not (value / "config.json").is_file():
            raise ValueError(f"{value} is not a model folder (no config.json)")
        return value

    @field_validator("max_batched_tokens")
    @classmethod
    def _has_room_for_every_sequence(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("max_num_seqs", 1):
            raise ValueError("must be at least BATON_MAX_NUM_SEQS: one token of each sequence in every step")
        return value
