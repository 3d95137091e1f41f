"""A scheduler without a model, for tests: blocks of 4 tokens, and the host that sequences need."""

import threading
from collections.abc import Sequence
from typing import Any

from services.engine.block_manager import BlockManager
from services.engine.detokenizer import TextStream
from services.engine.kv_cache import KvCache, KvLayout
from services.engine.request import EngineRequest, SampledToken, SamplingParams, SubmitMode
from services.engine.scheduler import Scheduler
from services.engine.sequence import EngineSequence
from services.engine.sim_model import make_tokenizer

TOKENIZER = make_tokenizer()
EOS = 0


class Bench:
    """A scheduler over blocks of 4 tokens, and the host of its sequences."""

    def __init__(self, num_blocks: int = 8, **limits: int) -> None:
        given = {"max_num_seqs": 8, "max_queue_len": 8, "max_batched_tokens": 16, "prefill_chunk": 8} | limits
        self.copied: list[tuple[int, int, int]] = []
        self.cleared: list[int] = []
        self.scheduler = Scheduler(
            BlockManager(num_blocks),
            copy_block=lambda *copy: self.copied.append(copy),
            clear_block=self.cleared.append,
            block_size=4,
            **given,
        )
        self.max_model_len = 1000
        self.vocab_size = 1000
        self.eos_token_ids = frozenset({EOS})
        self.cache = KvCache(KvLayout(num_layers=1, num_kv_heads=1, head_size=1), num_blocks, 4)
        self._lock = threading.RLock()
        self.num_arrived = 0

    def lock(self) -> threading.RLock:
        return self._lock

    def on_runnable(self, sequence: EngineSequence) -> None:
        pass

    def check_imported(self, sequence: EngineSequence) -> None:
        pass

    def adopt_prefix(self, sequence: EngineSequence) -> None:
        self.scheduler.adopt_prefix(sequence)

    def on_computed(self, sequence: EngineSequence) -> None:
        self.scheduler.note_computed(sequence)

    def on_ended(self, sequence: EngineSequence) -> None:
        self.scheduler.remove(sequence)

    on_released = on_ended

    def add(
        self,
        num_tokens: int,
        mode: SubmitMode = SubmitMode.LOCAL,
        priority: int = 0,
        max_tokens: int = 20,
        prompt: Sequence[int] = (),
        **sampling_changes: Any,
    ) -> EngineSequence:
        """A sequence whose prompt is its own, unless one is given; changes are fields of SamplingParams."""
        self.num_arrived += 1
        sampling = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **sampling_changes})
        request = EngineRequest(
            request_id=str(self.num_arrived),
            prompt_token_ids=tuple(prompt) or tuple(self.num_arrived * 20 + i for i in range(num_tokens)),
            sampling=sampling,
            priority=priority,
        )
        text = TextStream(TOKENIZER, sampling)
        sequence = EngineSequence(request, mode, self, text, arrival=self.num_arrived)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[tuple[str, int, int]]:
        """Admits, runs one step; what was run, by request ID."""
        self.scheduler.make_way()
        self.scheduler.admit()
        chunks = self.scheduler.schedule()
        done = [(c.sequence.request.request_id, c.start, c.end) for c in chunks]
        for chunk in chunks:
            chunk.sequence.take_chunk(chunk.start, chunk.end, SampledToken(70) if chunk.samples else None)
        return done
