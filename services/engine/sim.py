"""The simulated engine: real queue, blocks, pages and text, but tokens come from a rule and a timer.

A reply depends on its request alone: the words of a fixed text, or, with a temperature, words drawn by
(seed, choice, position). Keys and values are a function of (token, position, layer), so that a page
which ends up in the wrong place is noticed when its sequence joins.
"""

import random
import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from services.engine.config import EngineConfig
from services.engine.errors import InvalidKvPage, UnsupportedModel
from services.engine.identity import read_config
from services.engine.kv_cache import KvLayout
from services.engine.page_range import PageRange
from services.engine.paged_engine import PagedEngine
from services.engine.request import FirstTokenSampled, KvComputed, SampledToken, SubmitMode
from services.engine.sampler import uniform
from services.engine.sequence import EngineSequence
from services.engine.sequence_state import SequenceState
from services.engine.sim_model import REPLY_TEXT, words

_NEEDED = (
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "eos_token_id",
)
REPLY_LENGTH = 120  # tokens of a reply that is not asked to go on
_MOST_KV = 2048  # the whole numbers up to it are float16's too
_ROUNDING = 2.0**-20  # of int8's scales


@dataclass(slots=True, eq=False)
class _Run:
    """One stretch of computing a sequence, from when it became runnable.

    Times are due times, not measured ones, so that late timers do not add up.
    """

    sequence: EngineSequence
    due: float
    prefill_end: int  # positions before it have to be computed first
    started: float = field(default_factory=time.monotonic)


class SimEngine(PagedEngine):
    """Behind `interface.Engine`; needs a folder from `sim_model.write_sim_model`."""

    natural_length: ClassVar[int | None] = REPLY_LENGTH

    def __init__(self, config: EngineConfig) -> None:
        model = read_config(config.model)
        if missing := [name for name in _NEEDED if not isinstance(model.get(name), int)]:
            raise UnsupportedModel(f"the simulated engine needs {', '.join(missing)} in its config.json")
        layout = KvLayout(
            num_layers=model["num_hidden_layers"],
            num_kv_heads=model["num_key_value_heads"],
            head_size=model["head_dim"],
        )
        torch.set_num_threads(config.threads)
        super().__init__(
            config,
            layout,
            vocab_size=model["vocab_size"],
            model_max_len=model["max_position_embeddings"],
            eos_token_ids=(model["eos_token_id"],),
        )
        self._reply = self.tokenizer.encode(REPLY_TEXT).ids[:REPLY_LENGTH]
        self._words = [self.tokenizer.encode(f" {word}").ids[0] for word in words()]
        self._prefill_s = config.sim_prefill_ms_per_token / 1000
        self._random = random.Random(config.sim_seed)
        self._runs: dict[EngineSequence, _Run] = {}

    async def start(self) -> None:
        """See `interface.Engine.start`."""
        self._open()

    async def close(self) -> None:
        """See `interface.Engine.close`."""
        self._runs.clear()
        self._stop("the engine has been closed")

    def on_runnable(self, sequence: EngineSequence) -> None:
        has_joined = sequence.joined_at is not None and not sequence.was_preempted
        run = _Run(sequence, time.monotonic(), 0 if has_joined else sequence.num_tokens)
        if not has_joined and sequence.timings.queue_s is None:
            sequence.timings.queue_s = run.started - sequence.submitted_at
        self._runs[sequence] = run
        self._schedule(run)
        self._admit_soon()  # one reservation less: another may be let in

    def _remove(self, sequence: EngineSequence) -> None:
        self._runs.pop(sequence, None)
        super()._remove(sequence)

    def _admit(self) -> None:
        with self._lock:
            self.scheduler.make_way()  # nothing is ever in the middle of a step here
        super()._admit()

    def _schedule(self, run: _Run) -> None:
        """Sets the timer for the next chunk of the prompt or the next token."""
        assert self._loop is not None
        sequence = run.sequence
        ahead = run.prefill_end - sequence.num_computed_tokens
        if ahead > 0:
            count = min(ahead, self.config.prefill_chunk)
            run.due += count * self._prefill_s
            self._at(run, self._compute_chunk, count)
        else:
            jitter_ms = self.config.sim_jitter_ms
            delay_ms = self.config.sim_token_ms + self._random.uniform(-jitter_ms, jitter_ms)
            run.due += max(0.0, delay_ms) / 1000
            self._at(run, self._sample_token)

    def _at(self, run: _Run, step, *arguments: int) -> None:  # type: ignore[no-untyped-def]
        def fire() -> None:
            with self._lock:
                # A preempted or released sequence has another run, or none.
                if self._runs.get(run.sequence) is run and run.sequence.state is SequenceState.RUNNING:
                    step(run, *arguments)

        assert self._loop is not None
        self._loop.call_at(self._loop.time() + run.due - time.monotonic(), fire)

    def _compute_chunk(self, run: _Run, count: int) -> None:
        sequence = run.sequence
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        self._write(sequence, start, end)
        sequence.num_computed_tokens = end
        self.on_computed(sequence)
        self._count_computed(sequence, start, end)
        self._admit_soon()  # somebody may wait for this very prefix
        if sequence.mode is SubmitMode.PREFILL_ONLY:
            sequence.post([KvComputed(0, self.cache.layout.num_layers, start, end)])
        self._schedule(run)

    def _sample_token(self, run: _Run) -> None:
        sequence = run.sequence
        token = self._next_token(sequence)
        _note_times(sequence, run)
        if sequence.mode is SubmitMode.PREFILL_ONLY:
            sequence.state = SequenceState.ENDED  # the blocks stay until the pages have been taken
            del self._runs[sequence]
            sequence.post([FirstTokenSampled(token, sequence.num_cached_tokens)])
            return
        sequence.num_computed_tokens = sequence.num_tokens
        if sequence.num_tokens % self.cache.block_size == 0:  # a full block can be shared from now on
            self._write(sequence, sequence.num_tokens - self.cache.block_size, sequence.num_tokens)
        self.on_computed(sequence)
        sequence.post(sequence.take_tokens([token]))
        if sequence.state is SequenceState.RUNNING and self.scheduler.grow(sequence):
            self._schedule(run)
        self._restart_preempted()

    def _restart_preempted(self) -> None:
        """Whoever lost its blocks to another's growth may fit elsewhere at once."""
        lost = [sequence for sequence in self._runs if sequence.state is SequenceState.WAITING]
        for sequence in lost:
            del self._runs[sequence]
        if lost:
            self._admit_soon()

    def _admit_soon(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._admit)

    def _next_token(self, sequence: EngineSequence) -> SampledToken:
        request = sequence.request
        sampling = request.sampling
        if sampling.temperature > 0:
            draw = uniform(sampling.seed, request.choice_index, sequence.num_tokens)
            token_id = self._words[int(draw * len(self._words))]
        else:
            token_id = self._reply[sequence.num_generated_tokens % len(self._reply)]
        if sampling.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, 0.0, ((token_id, 0.0),) if sampling.logprobs else ())

    def _expected_kv(self, sequence: EngineSequence, start: int, end: int) -> torch.Tensor:
        """(layers, 2, tokens, kv_heads, head_size), from token, position and layer alone."""
        layout = self.cache.layout
        tokens = torch.tensor(sequence.token_ids[start:end])
        # Another hash for each layer's keys and values; whole numbers that every payload format can carry.
        planes = torch.arange(1, 2 * layout.num_layers + 1).view(-1, 1)
        mixed = (tokens * 40_503 + torch.arange(start, end) * 10_007 + planes) * (planes * 2_654_435 + 1)
        kv = ((mixed >> 12) % _MOST_KV + 1).float()
        kv = kv.view(layout.num_layers, 2, end - start, 1, 1)
        return kv.expand(-1, -1, -1, layout.num_kv_heads, layout.head_size)

    def _write(self, sequence: EngineSequence, start: int, end: int) -> None:
        slots = self.cache.slots(sequence.block_table, start, end)
        expected = self._expected_kv(sequence, start, end)
        for kv, (keys, values) in zip(self.cache.layers, expected, strict=True):
            kv.keys[slots], kv.values[slots] = keys, values

    def check_imported(self, sequence: EngineSequence) -> None:
        """Keys and values follow from the prompt here, so those of another one are noticed."""
        end = sequence.request.num_context_tokens
        held = self.cache.export_range(
            sequence.block_table, PageRange(0, self.cache.layout.num_layers, 0, end)
        )
        expected = self._expected_kv(sequence, 0, end)
        if not torch.equal(held, expected) and not torch.allclose(held, expected, rtol=_ROUNDING, atol=0):
            raise InvalidKvPage("the imported KV cache is not this prompt's")


def _note_times(sequence: EngineSequence, run: _Run) -> None:
    timings, now = sequence.timings, time.monotonic()
    if sequence.joined_at is not None and timings.join_s is None:
        timings.join_s = run.started - sequence.joined_at
        timings.first_step_s = now - run.started
    elif sequence.joined_at is None and timings.prefill_s is None:
        timings.prefill_s = now - run.started
