"""Who asks: API keys from a file, and the owner hash that scopes replies.

Invariant: keys are kept and compared only as digests, in constant time. Without a file everybody
is the one owner "". Must not know: replies.
"""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from gateway.errors import UNKNOWN_REPLY, NotFound, Unauthorized


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    """The keys that may use this gateway; none configured means open."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @classmethod
    def from_file(cls, path: Path | None) -> Self:
        """One key a line; blank lines and those beginning with # are skipped.

        Raises ValueError for a file without keys: it would lock everybody out, or let them in. Raises
        OSError for one that cannot be read.
        """
        if path is None:
            return cls()
        lines = (line.strip() for line in path.read_text().splitlines())
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise ValueError(f"{path} holds no key; write one key a line, or unset it to serve without keys")
        return cls(keys)

    def owner(self, headers: Mapping[str, str]) -> str:
        """The owner hash of the caller. Raises Unauthorized."""
        if not self._digests:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            raise Unauthorized("No API key: send it as `Authorization: Bearer ...` or `x-api-key`.")
        digest, found = _digest(given), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        if not found:
            raise Unauthorized("Incorrect API key.")
        return digest


def check_owner(owner_hash: str, caller: str) -> None:
    """Raises what an unknown reply raises, so that nobody learns of the replies of others."""
    if not hmac.compare_digest(owner_hash, caller):
        raise NotFound(UNKNOWN_REPLY, code="stream_not_found")
