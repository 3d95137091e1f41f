"""How every process, worker or gateway, reads its settings: `BATON_*` variables, once, frozen, loud.

Must load neither torch nor gRPC: gateways and quick refusals live on this too.
"""

import sys
from typing import Annotated, Self

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


def _check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port; write for example 127.0.0.1:50051")
    return address


Address = Annotated[str, AfterValidator(_check_address)]


class ProcessSettings(BaseSettings):
    """Base of each process's settings. A bad value stops the process: `load` is the only way in.

    What is here has to be the same for the processes that talk to each other.
    """

    model_config = SettingsConfigDict(env_prefix="BATON_", frozen=True, extra="ignore", allow_inf_nan=False)

    ping_s: float = Field(2.0, ge=0.1)  # seconds between pings to whoever a process talks to
    ping_timeout_s: float = Field(4.0, ge=0.1)  # without an answer for so long, it counts as gone

    @classmethod
    def load(cls) -> Self:
        """Parses the environment; on a bad value prints each variable at fault and exits with 2."""
        try:
            return cls()
        except ValidationError as error:
            for fault in error.errors():
                name = f"BATON_{fault['loc'][0]}".upper() if fault["loc"] else "BATON_*"
                # Addresses may hold passwords, and this ends up in logs.
                is_secret = "://" in str(fault["input"])
                given = "" if fault["type"] == "missing" or is_secret else f" (got {fault['input']!r})"
                message = fault["msg"].removeprefix("Value error, ")
                print(f"{name}: {message}{given}", file=sys.stderr)
            raise SystemExit(2) from None
