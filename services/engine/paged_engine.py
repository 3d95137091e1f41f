"""What the real and the simulated engine have in common: admission, blocks, delivery of events.

Invariant: every sequence that was submitted and not released is known here, so that a failing engine
leaves nobody waiting. A subclass computes; it is told when a sequence becomes runnable.
"""

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import structlog
import torch
from tokenizers import Tokenizer

from services.engine.block_manager import BlockManager
from services.engine.config import EngineConfig
from services.engine.detokenizer import TextStream
from services.engine.errors import EngineStopped, UnsupportedModel
from services.engine.identity import make_identity
from services.engine.kv_cache import KvCache, KvLayout, num_blocks_for, pool_bytes
from services.engine.request import EngineInfo, EngineLoad, EngineRequest, SubmitMode
from services.engine.request_check import check_request
from services.engine.scheduler import Scheduler
from services.engine.sequence import EngineSequence
from services.engine.sequence_state import SequenceState
from services.engine.shared_pool import create_shared_pool

log = structlog.get_logger()


class PagedEngine(ABC):
    """Base of the engines; implements `interface.Engine` but for start and close."""

    natural_length: ClassVar[int | None] = None  # of a simulated reply

    def __init__(
        self,
        config: EngineConfig,
        layout: KvLayout,
        *,
        vocab_size: int,
        model_max_len: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | None = None,
    ) -> None:
        self.config = config
        longest = min(config.max_model_len or model_max_len, model_max_len)
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        num_blocks = num_blocks_for(
            layout,
            config.block_size,
            config.kv_memory_bytes,
            most_tokens=config.max_num_seqs * longest,
        )
        # What the pool cannot hold the worker does not offer, so a request without a limit gets one.
        self.max_model_len = min(longest, num_blocks * config.block_size)
        is_shared = config.share_kv and (device is None or device.type == "cpu")
        pool = create_shared_pool(pool_bytes(layout, num_blocks, config.block_size)) if is_shared else None
        self._shared_pool = pool
        self.cache = KvCache(layout, num_blocks, config.block_size, device, pool.tensor() if pool else None)
        self.scheduler = Scheduler(
            BlockManager(num_blocks),
            copy_block=self.cache.copy_block if config.prefix_cache else None,
            clear_block=self.cache.clear_block,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_queue_len=config.max_queue_len,
            max_batched_tokens=config.max_batched_tokens,
            prefill_chunk=config.prefill_chunk,
        )
        self.tokenizer = _load_tokenizer(config)
        self.info = EngineInfo(
            identity=make_identity(config.model, config.model_name, layout),
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_queue_len=config.max_queue_len,
            eos_token_ids=eos_token_ids,
            shared_pool=pool.offer if pool else None,
        )
        self.num_prompt_tokens_computed = 0
        self.num_tokens_recomputed = 0
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrivals = itertools.count()
        self._live: set[EngineSequence] = set()
        self._stopped: EngineStopped | None = EngineStopped("the engine has not been started")
        self._has_failed = asyncio.Event()
        num_tokens = num_blocks * config.block_size
        if self.max_model_len < longest:
            log.warning(
                "the KV memory bounds the context: raise BATON_KV_MEMORY_MB",
                max_model_len=self.max_model_len,
                of=longest,
            )
        log.info(
            "kv cache",
            bytes_per_token=layout.bytes_per_token,
            blocks=num_blocks,
            tokens=num_tokens,
            longest_sequences=num_tokens // self.max_model_len,
            mib=num_tokens * layout.bytes_per_token // 2**20,
        )

    # The interface

    def submit(self, request: EngineRequest, mode: SubmitMode) -> EngineSequence:
        """See `interface.Engine.submit`."""
        if self._stopped is not None:
            raise self._stopped
        check_request(request, mode, self.info, self.vocab_size)
        # A prefill makes no text, so it need not know where the text stands.
        prior = () if mode is SubmitMode.PREFILL_ONLY else request.generated_token_ids
        text = TextStream(self.tokenizer, request.sampling, prior)
        natural_length = None if request.sampling.ignore_eos else self.natural_length
        with self._lock:
            sequence = EngineSequence(
                request, mode, self, text, arrival=next(self._arrivals), natural_length=natural_length
            )
            events = [] if mode is SubmitMode.PREFILL_ONLY else sequence.end_if_complete()
            if not events:
                self.scheduler.add(sequence)
            self._live.add(sequence)
        if events:
            sequence.post(events)
            sequence.announce_reserved()
        else:
            self._admit()
        return sequence

    def load(self) -> EngineLoad:
        """See `interface.Engine.load`."""
        with self._lock:
            return EngineLoad(
                running=self.scheduler.num_running,
                waiting=self.scheduler.num_waiting,
                blocks_used=self.scheduler.blocks.num_used,
                blocks_cached=self.scheduler.blocks.num_cached,
                blocks_total=self.scheduler.blocks.num_blocks,
                prompt_tokens_computed=self.num_prompt_tokens_computed,
                tokens_recomputed=self.num_tokens_recomputed,
            )

    async def failed(self) -> None:
        """See `interface.Engine.failed`."""
        await self._has_failed.wait()

    # For the sequences, with the lock held

    def lock(self) -> threading.RLock:
        return self._lock

    def adopt_prefix(self, sequence: EngineSequence) -> None:
        self.scheduler.adopt_prefix(sequence)

    def on_computed(self, sequence: EngineSequence) -> None:
        self.scheduler.note_computed(sequence)

    def on_ended(self, sequence: EngineSequence) -> None:
        self._remove(sequence)

    def on_released(self, sequence: EngineSequence) -> None:
        self._live.discard(sequence)
        self._remove(sequence)

    @abstractmethod
    def on_runnable(self, sequence: EngineSequence) -> None:
        """The sequence can be computed from now on."""

    @abstractmethod
    def check_imported(self, sequence: EngineSequence) -> None:
        """Looks at a complete import before it joins. Raises InvalidKvPage."""

    # For the subclasses

    def _remove(self, sequence: EngineSequence) -> None:
        """Frees the blocks and lets those that wait for them in."""
        self.scheduler.remove(sequence)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._admit)

    def _admit(self) -> None:
        """Lets waiting sequences in. On the event loop."""
        with self._lock:
            admitted = self.scheduler.admit()
            for sequence in admitted:
                if sequence.state is SequenceState.RUNNING:
                    self.on_runnable(sequence)
        self._announce(admitted)

    def _announce(self, admitted: Iterable[EngineSequence]) -> None:
        for sequence in admitted:
            sequence.announce_reserved()

    def _count_computed(self, sequence: EngineSequence, start: int, end: int) -> None:
        """Counts prompt tokens run here, and tokens computed again.

        These are what a preemption has lost and, of a continuation, what another run had computed.
        """
        request, once = sequence.request, sequence.num_once_computed_tokens
        num_prompt, num_context = len(request.prompt_token_ids), request.num_context_tokens
        self.num_prompt_tokens_computed += max(0, min(end, num_prompt) - start)
        self.num_tokens_recomputed += max(0, min(end, once) - start)
        self.num_tokens_recomputed += max(0, min(end, num_context) - max(start, num_prompt, once))

    def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = None

    def _stop(self, reason: str) -> None:
        """Takes no more work and fails what is there. On the event loop."""
        if self._stopped is not None:
            return
        self._stopped = EngineStopped(reason)
        if self._shared_pool is not None:
            self._shared_pool.close()
        for sequence in tuple(self._live):
            sequence.fail(self._stopped)


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    path = config.model / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel("it has no tokenizer.json (save the fast tokenizer beside the weights)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library's only type
        raise UnsupportedModel(f"its tokenizer.json cannot be read: {error}") from error
