"""How every process, worker or gateway, reads its settings: `BATON_*` variables, once, frozen, loud.

Must load neither torch nor gRPC: gateways and quick refusals live on this too.
"""

import sys
from typing import Annotated, Self

from pydantic import AfterValidator, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


def _check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port; write for example 127.0.0.1:50051")
    return address


Address = Annotated[str, AfterValidator(_check_address)]


class ProcessSettings(BaseSettings):
    """Base of each process's settings. A bad value stops the process: `load` is the only way in."""

    model_config = SettingsConfigDict(env_prefix="BATON_", frozen=True, extra="ignore")

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
