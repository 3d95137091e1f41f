"""Settings of a gateway process: what each `BATON_*` variable may be; `services/environment.py` reads them.

Invariant: nothing else in `gateway/` reads the environment.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode
from redis.asyncio.connection import parse_url

from gateway.keepalive import KeepaliveMode
from gateway.routing.names import parse_entry
from gateway.routing.policy import Affinity, RoutingPolicy
from services.environment import Address, ProcessSettings


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_entry(entry: str) -> str:
    parse_entry(entry)  # its ValueError says what to write instead
    return entry


# `host:port` or `dns:///name:port` each
Workers = Annotated[
    tuple[Annotated[str, AfterValidator(_check_entry)], ...], NoDecode, BeforeValidator(_split)
]


class GatewaySettings(ProcessSettings):
    """One gateway process. Durations in seconds."""

    listen: Address = "127.0.0.1:8000"
    redis_url: str = ""  # empty: replies live in this process's memory
    model: Path = Field(description="folder with tokenizer.json and chat_template.jinja")
    decode_workers: Workers = Field(min_length=1)
    prefill_workers: Workers = ()  # none: decode workers run prompts themselves
    discovery_s: float = Field(5.0, gt=0)  # between lookups of a DNS name
    routing: RoutingPolicy = RoutingPolicy.PREFIX_AFFINITY
    affinity_blocks: int = Field(16, ge=1)  # of a prompt's beginning, as long as the workers' KV blocks
    affinity_load_bound: float = Field(1.25, gt=1)  # how much more than its share a worker takes
    api_keys_file: Path | None = None  # none: open to everybody who can connect
    require_log: bool = False  # true: no new replies while the event log is down

    resume_grace_s: float = Field(30.0, ge=0)
    lease_s: float = Field(3.0, gt=0)
    reply_ttl_s: float = Field(600.0, gt=0)
    keepalive_s: float = Field(15.0, gt=0)
    keepalive_mode: KeepaliveMode = KeepaliveMode.FORMAT
    admit_timeout_s: float = Field(5.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
    retry_s: float = Field(10.0, ge=0)  # how long a reply looks for another decode worker
    slow_client_s: float = Field(30.0, gt=0)  # a client that neither reads nor sends for so long is dropped
    drain_s: float = Field(25.0, ge=0)

    max_body_bytes: int = Field(2 * 1024 * 1024, ge=1024)
    max_consumers: int = Field(64, ge=1)  # streams of one reply at this gateway; above it: 429
    max_replies: int = Field(4096, ge=1)  # being generated at once; above it: 429

    @field_validator("decode_workers", "prefill_workers")
    @classmethod
    def _are_distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a worker twice")
        return value

    @property
    def affinity(self) -> Affinity | None:
        """How workers are picked by what prompts begin with; None by load alone."""
        if self.routing is RoutingPolicy.LEAST_LOADED:
            return None
        return Affinity(self.affinity_blocks, self.affinity_load_bound)

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, value: str) -> str:
        if value:
            parse_url(value)  # its ValueError says what is wrong
        return value

    @field_validator("model")
    @classmethod
    def _has_tokenizer(cls, value: Path) -> Path:
        if not (value / "tokenizer.json").is_file():
            raise ValueError(f"{value} has no tokenizer.json; name a Hugging Face model folder")
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _is_file(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError(
                f"{value} is not a file; write one key a line, or unset it to serve without keys"
            )
        return value
