"""Tells prefill-only sequences, while a step runs, which layers of their chunks are in the cache already.

Their pages travel while the layers above are computed: of the last chunk of a prompt, only what the last
layers add is left to send when the first token is known.
"""

from collections.abc import Callable, Sequence

from services.engine.kv_cache import KvLayout
from services.engine.request import KvComputed, SubmitMode
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.sequence import EngineSequence

_LEAST_BYTES = 1024 * 1024  # of a sequence's keys and values: about a page


class LayerReport:
    """Of one step; called in the engine's thread with each layer whose keys and values are written.

    Layers count if they come in order, as those of every model served do; else the end of the step tells.

    Attributes:
        num_layers: how many, from the first on, have been reported.
    """

    def __init__(
        self,
        chunks: Sequence[ScheduledChunk],
        layout: KvLayout,
        hand_over: Callable[[EngineSequence, KvComputed], None],
    ) -> None:
        self.num_layers = 0
        self._of_all = layout.num_layers
        self._chunks = [chunk for chunk in chunks if chunk.sequence.mode is SubmitMode.PREFILL_ONLY]
        self._hand_over = hand_over
        self._num_written = 0
        num_tokens = max((chunk.end - chunk.start for chunk in self._chunks), default=0)
        bytes_per_layer = max(1, num_tokens * layout.bytes_per_token // layout.num_layers)
        self._every = -(-_LEAST_BYTES // bytes_per_layer)

    @property
    def is_wanted(self) -> bool:
        return bool(self._chunks)

    def __call__(self, layer: int) -> None:
        if layer != self._num_written:
            return
        self._num_written += 1
        if self._num_written - self.num_layers < self._every and self._num_written < self._of_all:
            return
        layers = (self.num_layers, self._num_written)
        self.num_layers = self._num_written
        for chunk in self._chunks:
            self._hand_over(chunk.sequence, KvComputed(*layers, chunk.start, chunk.end))
