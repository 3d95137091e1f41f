"""The engine as its sequences see it."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from services.engine.kv_cache import KvCache

if TYPE_CHECKING:
    from services.engine.sequence import EngineSequence


class SequenceHost(Protocol):
    """Called with the lock held, except `lock` itself."""

    cache: KvCache
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def lock(self) -> AbstractContextManager[object]: ...
    def adopt_prefix(self, sequence: "EngineSequence") -> None: ...
    def check_imported(self, sequence: "EngineSequence") -> None: ...
    def on_computed(self, sequence: "EngineSequence") -> None: ...
    def on_runnable(self, sequence: "EngineSequence") -> None: ...
    def on_ended(self, sequence: "EngineSequence") -> None: ...
    def on_released(self, sequence: "EngineSequence") -> None: ...
