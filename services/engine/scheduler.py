"""Which sequences hold blocks, and which tokens the next step runs.

Invariants:
- a sequence is never preempted for one of lower priority or that came later, so the first one makes
  progress, unless what it needs is reserved, or holds pages on their way out of a prefill: it waits for
  these, and they are filled, sent or given up;
- reservations together take at most half the pool, or there is only one, which leaves those that run
  already what they can still come to need: it waits, and who comes later waits behind it, until it does;
- a preempted sequence re-enters before new ones; its tokens stand and are computed again;
- a block that a sequence writes to is its own: what the prefix cache gives is shared whole or copied.

Knows counts of tokens and blocks, neither tensors nor text.
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from services.engine.block_manager import BlockManager, blocks_for
from services.engine.errors import QueueFull
from services.engine.prefix_cache import PrefixCache, PrefixMatch
from services.engine.request import SubmitMode
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.sequence import EngineSequence
from services.engine.sequence_state import SequenceState


class Scheduler:
    """Admission in order of priority and arrival, then continuous batching under a token budget.

    Args:
        copy_block: see `PrefixCache`; None turns the prefix cache off.
        clear_block: takes out of a block what must not be read, not even behind a mask.
        max_batched_tokens: at least `max_num_seqs`, or some that decode would never have their turn.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        copy_block: Callable[[int, int, int], None] | None,
        clear_block: Callable[[int], None],
        block_size: int,
        max_num_seqs: int,
        max_queue_len: int,
        max_batched_tokens: int,
        prefill_chunk: int,
    ) -> None:
        self.blocks = blocks
        self._prefixes = PrefixCache(blocks, block_size, copy_block)
        self._clear_block = clear_block
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_queue_len = max_queue_len
        self._max_batched_tokens = max_batched_tokens
        self._prefill_chunk = prefill_chunk
        self._waiting: list[EngineSequence] = []  # best first
        self._admitted: list[EngineSequence] = []  # every sequence with blocks, first those that came first

    @property
    def num_running(self) -> int:
        return sum(sequence.state is SequenceState.RUNNING for sequence in self._admitted)

    @property
    def num_waiting(self) -> int:
        """Queued, and reserved but not yet joined."""
        reserved = sum(sequence.state is SequenceState.RESERVED for sequence in self._admitted)
        return len(self._waiting) + reserved

    @property
    def has_runnable(self) -> bool:
        return any(sequence.state is SequenceState.RUNNING for sequence in self._admitted)

    def add(self, sequence: EngineSequence) -> None:
        """Queues a new sequence. Raises QueueFull."""
        if len(self._waiting) >= self._max_queue_len and not self._would_be_admitted(sequence):
            raise QueueFull(f"no room now, and {len(self._waiting)} requests wait already; try again later")
        insort(self._waiting, sequence, key=_rank)

    def admit(self) -> list[EngineSequence]:
        """Gives blocks to waiting sequences, in order, as long as the first one fits.

        One whose prefix somebody of no lower priority is computing right now waits for it rather than
        compute it again, and holds up nobody.
        """
        admitted = []
        for sequence, match in self._in_line(tuple(self._waiting)):
            if self._prefixes.is_coming(match, sequence):
                continue
            if not self._fits(sequence, match):
                break
            self._waiting.remove(sequence)
            self._take_blocks(sequence, match)
            sequence.state = SequenceState.RUNNING if sequence.computes_locally else SequenceState.RESERVED
            insort(self._admitted, sequence, key=_seniority)
            admitted.append(sequence)
        return admitted

    def make_way(self) -> None:
        """Preempts for the first in line, if it had to give way itself, those behind it that keep it out.

        It gave way to reservations. When these have been filled they run, and it, which came before them,
        can take no blocks from anybody while it waits. Not in the middle of a step, which writes to blocks.
        """
        for sequence, match in self._in_line(tuple(self._waiting)):
            if self._prefixes.is_coming(match, sequence):
                continue
            if sequence.was_preempted:
                self._make_way(sequence, match)
            return

    def _make_way(self, sequence: EngineSequence, match: PrefixMatch) -> None:
        behind = [s for s in self._admitted if s.is_preemptible and _seniority(s) > _seniority(sequence)]
        rest = [s for s in self._admitted if s not in behind]
        kept = {block for other in rest for block in other.block_table}.union(match.blocks)
        fresh = self._blocks_at_admission(sequence) - len(match.blocks)
        if len(rest) >= self._max_num_seqs or len(kept) + fresh > self.blocks.num_blocks:
            return  # they would give way for nothing
        while not self._fits(sequence, match):
            self._preempt(behind.pop())

    def _in_line(self, waiting: Iterable[EngineSequence]) -> Iterator[tuple[EngineSequence, PrefixMatch]]:
        """Those who do not wait for others' reservations, and what the cache holds for each.

        One that is to reserve blocks while others have reserved their share holds up only those that are
        to reserve after it.
        """
        may_reserve = True
        for sequence in waiting:
            if not sequence.computes_locally:
                may_reserve = may_reserve and self._may_reserve(sequence)
            if sequence.computes_locally or may_reserve:
                yield sequence, self._find_prefix(sequence)

    def equals_of(self, authors: Collection[EngineSequence]) -> list[EngineSequence]:
        """Those who wait until one of the authors has computed the whole context that is theirs too.

        But for who had computed it before it was preempted: it has seen that nothing is wrong with it.
        """
        return [
            sequence
            for sequence in self._waiting
            if sequence.num_once_computed_tokens < sequence.request.num_context_tokens
            and (author := self._prefixes.awaited(self._find_prefix(sequence), sequence)) in authors
            and author is not None
            and author.request.context == sequence.request.context
        ]

    def schedule(self) -> list[ScheduledChunk]:
        """The next step: one token for each decoding sequence, then chunks of prompts, in order."""
        budget = self._max_batched_tokens
        batch: list[ScheduledChunk] = []
        # First, for it may take the blocks of those behind.
        running = [sequence for sequence in self._running() if self.grow(sequence)]
        for sequence in sorted(running, key=_is_prefilling):
            count = min(sequence.num_uncomputed_tokens, self._prefill_chunk, budget)
            if count:
                batch.append(_chunk(sequence, count))
                budget -= count
        return batch

    def _running(self) -> Iterator[EngineSequence]:
        """In order; without those that are preempted meanwhile."""
        for sequence in tuple(self._admitted):
            if sequence.state is SequenceState.RUNNING:
                yield sequence

    def grow(self, sequence: EngineSequence) -> bool:
        """Makes room for all of the sequence's tokens, if need be at the expense of those behind it.

        False: no room, and the sequence itself has been preempted.
        """
        while len(sequence.block_table) * self._block_size < sequence.num_tokens:
            if self.blocks.can_allocate(1):
                sequence.block_table += self.blocks.allocate(1)
                continue
            victim = next(other for other in reversed(self._admitted) if other.is_preemptible)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def adopt_prefix(self, sequence: EngineSequence) -> None:
        """Uses what is cached by now for a sequence that was to import its KV cache."""
        match = self._prefixes.find(sequence)
        if match.num_tokens > sequence.num_held_tokens:
            count = len(match.blocks)
            self.blocks.share(match.blocks)
            self.blocks.free(sequence.block_table[:count])
            sequence.block_table[:count] = match.blocks
            self._prefixes.take(sequence, match)
        self._prefixes.start(sequence, max(match.num_tokens, sequence.num_held_tokens))

    def note_computed(self, sequence: EngineSequence) -> None:
        """Lets others use what the sequence has computed; call whenever `num_computed_tokens` grows."""
        self._prefixes.publish(sequence)

    def distrust(self, sequence: EngineSequence) -> None:
        """The sequence's blocks may hold NaN: nobody new shares them. Those who do now will notice."""
        self.blocks.unpublish(sequence.block_table)

    def remove(self, sequence: EngineSequence) -> None:
        """Forgets a sequence and frees its blocks; nothing if it is not here."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._admitted:
            self._let_go(sequence)

    def _preempt(self, victim: EngineSequence) -> None:
        self._let_go(victim)
        victim.preempt()
        insort(self._waiting, victim, key=_rank)

    def _let_go(self, sequence: EngineSequence) -> None:
        self._admitted.remove(sequence)
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        self._prefixes.forget(sequence)

    def _find_prefix(self, sequence: EngineSequence) -> PrefixMatch:
        """What is cached. A sequence that imports the rest waits for nobody who computes it."""
        match = self._prefixes.find(sequence)
        return match if sequence.computes_locally else replace(match, missing=None)

    def _take_blocks(self, sequence: EngineSequence, match: PrefixMatch) -> None:
        self.blocks.share(match.blocks)
        fresh = self.blocks.allocate(self._blocks_at_admission(sequence) - len(match.blocks))
        sequence.block_table = [*match.blocks, *fresh]
        self._prefixes.take(sequence, match)
        if sequence.computes_locally:
            self._prefixes.start(sequence, match.num_tokens)
            return
        sequence.hold_prefix(match.num_tokens)
        # An import that fills its last block only in part; a copied tail has cleared the rest already.
        if match.tail is None and sequence.num_tokens % self._block_size:
            self._clear_block(sequence.block_table[sequence.num_tokens // self._block_size])

    def _fits(self, sequence: EngineSequence, match: PrefixMatch) -> bool:
        if len(self._admitted) >= self._max_num_seqs:
            return False
        needed = self._blocks_at_admission(sequence)
        fresh = needed - len(match.blocks)
        if not sequence.computes_locally and needed > self.blocks.num_blocks // 2:
            fresh += sum(self._most_blocks(other) - len(other.block_table) for other in self._running())
        return self.blocks.can_allocate(fresh, sharing=match.blocks)

    def _may_reserve(self, sequence: EngineSequence) -> bool:
        """Alone it may take what it needs, beside others only what is left of half the pool."""
        reserved = [s for s in self._admitted if s.state is SequenceState.RESERVED]
        share_left = self.blocks.num_blocks // 2 - sum(len(s.block_table) for s in reserved)
        return not reserved or self._blocks_at_admission(sequence) <= share_left

    def _would_be_admitted(self, sequence: EngineSequence) -> bool:
        """Whether it would get its blocks at once, or as soon as its prefix is there.

        Then a queue of length zero is no obstacle; but there must be a place for each who waits already.
        """
        if len(self._admitted) + len(self._waiting) >= self._max_num_seqs:
            return False
        for other, match in self._in_line(sorted((*self._waiting, sequence), key=_rank)):
            if other is sequence:
                return self._fits(sequence, match)
            if not self._prefixes.is_coming(match, other):
                return False
        return False

    def _blocks_at_admission(self, sequence: EngineSequence) -> int:
        """The context's blocks and one more, but never more than the sequence can ever fill."""
        needed = blocks_for(sequence.num_tokens, self._block_size)
        if sequence.mode is SubmitMode.PREFILL_ONLY:
            return needed
        return min(needed + 1, self._most_blocks(sequence))

    def _most_blocks(self, sequence: EngineSequence) -> int:
        return blocks_for(sequence.most_tokens, self._block_size)


def _seniority(sequence: EngineSequence) -> tuple[int, int]:
    return (-sequence.request.priority, sequence.arrival)


def _rank(sequence: EngineSequence) -> tuple[int, bool, int]:
    """In the queue: whoever had blocks comes before those that had none."""
    return (-sequence.request.priority, not sequence.was_preempted, sequence.arrival)


def _is_prefilling(sequence: EngineSequence) -> bool:
    return sequence.num_uncomputed_tokens > 1


def _chunk(sequence: EngineSequence, count: int) -> ScheduledChunk:
    start = sequence.num_computed_tokens
    return ScheduledChunk(sequence, start, start + count)
