"""Settings of a gateway process, from `BATON_*` variables, parsed once and frozen.

Invariant: a bad value stops the process with the variable's name and the way out; nothing else in
the gateway reads the environment. `load` is the only way in.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class KeepaliveMode(StrEnum):
    """What is written on a silent stream. FORMAT leaves it to the format."""

    FORMAT = ""
    COMMENT_LINE = "comment-line"
    COMMENT_BLOCK = "comment-block"
    PING = "ping"
    OFF = "off"


def _check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port; write for example 127.0.0.1:50051")
    return address


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Addresses = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class GatewaySettings(BaseSettings):
    """One gateway process. Durations in seconds."""

    model_config = SettingsConfigDict(env_prefix="BATON_", frozen=True, extra="ignore")

    listen: str = "127.0.0.1:8000"
    redis_url: str = ""  # empty: replies live in this process's memory
    model: Path = Field(description="folder with tokenizer.json and chat_template.jinja")
    decode_workers: Addresses = Field(min_length=1)
    prefill_workers: Addresses = ()  # none: decode workers run prompts themselves
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

    @field_validator("listen")
    @classmethod
    def _listen_is_address(cls, value: str) -> str:
        return _check_address(value)

    @field_validator("decode_workers", "prefill_workers")
    @classmethod
    def _workers_are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a worker twice")
        return tuple(_check_address(address) for address in value)

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, value: str) -> str:
        if value and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(
                "must begin with redis://, rediss:// or unix://; leave empty to do without Redis"
            )
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

    @classmethod
    def load(cls) -> Self:
        """Parses the environment; on a bad value prints each variable at fault and exits with 2."""
        try:
            return cls()
        except ValidationError as error:
            for fault in error.errors():
                name = f"BATON_{fault['loc'][0]}".upper() if fault["loc"] else "BATON_*"
                given = "" if fault["type"] == "missing" else f" (got {fault['input']!r})"
                print(f"{name}: {fault['msg']}{given}", file=sys.stderr)
            raise SystemExit(2) from None
