"""Decode steps on static buffers, so that a GPU can replay one as a graph without Python in between.

A step is padded to one of a few batch sizes and table lengths. Padding rows are sequences of one token in
the cache's scratch block, which belongs to nobody: they change nothing for real rows. What a graph is stays
behind `Capture`: CUDA's on a GPU, a plain call on the same buffers in the tests. Never run on a GPU so far.
"""

from collections.abc import Callable, Sequence

import torch

from services.engine import attention
from services.engine.attention import AttentionGroup, AttentionStep
from services.engine.block_manager import blocks_for
from services.engine.graph_model import Forward
from services.engine.kv_cache import KvCache
from services.engine.scheduled_chunk import ScheduledChunk
from services.engine.varlen import VarlenKernel, VarlenQueries

Replay = Callable[[], torch.Tensor]
Capture = Callable[[Replay], Replay]  # from a function on static buffers to its replay

_SHORTEST_TABLE = 256  # positions


def capture_nothing(function: Replay) -> Replay:
    """Calls the function itself."""
    return function


class CudaCapture:
    """Captures CUDA graphs that share one memory pool: they never run at once."""

    _NUM_WARM_UPS = 2  # libraries set themselves up in the first calls, which must not be captured

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Replay) -> Replay:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._NUM_WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy pages meanwhile: only this thread's calls are the graph's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class DecodeStep:
    """One token each of up to `batch` sequences of up to `num_blocks` blocks. `fill`, then `run`."""

    def __init__(
        self,
        compute: Forward,
        cache: KvCache,
        batch: int,
        num_blocks: int,
        *,
        kernel: VarlenKernel | None = None,
        capture: Capture = capture_nothing,
    ) -> None:
        self.batch, self.num_blocks = batch, num_blocks
        self._compute, self._cache = compute, cache
        device, is_cuda = cache.device, cache.device.type == "cuda"
        # Token IDs, positions, new slots, block tables: one buffer, so one copy fills them all.
        self._inputs = torch.zeros(batch * (3 + num_blocks), dtype=torch.long, device=device)
        self._staging = torch.zeros_like(self._inputs, device="cpu", pin_memory=is_cuda)
        sizes = [batch, batch, batch, batch * num_blocks]
        self._token_ids, self._positions, slots, tables = torch.split(self._inputs, sizes)
        self._rows = torch.arange(batch, device=device)
        group = AttentionGroup(
            rows=slice(0, batch),
            flat_blocks=tables,
            positions=self._positions.unsqueeze(-1),
            length=num_blocks * cache.block_size,
            is_whole_step=True,
        )
        self._step = AttentionStep(cache, slots, [group])
        if kernel is not None:
            self._step.varlen = VarlenQueries(
                kernel=kernel,
                starts=torch.arange(batch + 1, dtype=torch.int32, device=device),
                lengths=torch.ones(batch, dtype=torch.int32, device=device),
                tables=torch.zeros(batch, num_blocks, dtype=torch.int32, device=device),
                longest=1,
            )
        self._num_filled = 0
        self.fill([])
        self._replay = capture(self._forward)

    def fill(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Puts at most `batch` single-token chunks in; the rest becomes padding."""
        scratch, size = self._cache.scratch_block, self._cache.block_size
        padding = self.batch - len(chunks)
        tables = [chunk.sequence.block_table[: blocks_for(chunk.end, size)] for chunk in chunks]
        values = [chunk.sequence.token_ids[chunk.start] for chunk in chunks] + [0] * padding
        values += [chunk.start for chunk in chunks] + [0] * padding
        values += [
            table[chunk.start // size] * size + chunk.start % size
            for table, chunk in zip(tables, chunks, strict=True)
        ]
        values += [scratch * size] * padding
        for table in tables:
            values += table
            values += [scratch] * (self.num_blocks - len(table))
        values += [scratch] * (self.num_blocks * padding)
        self._staging.copy_(torch.tensor(values))
        self._inputs.copy_(self._staging, non_blocking=True)
        self._num_filled = len(chunks)

    @torch.inference_mode()
    def run(self) -> torch.Tensor:
        """Logits (S, vocabulary) of the S chunks, valid until the next `run`."""
        return self._replay()[0, : self._num_filled]

    @torch.inference_mode()
    def _forward(self) -> torch.Tensor:
        step = self._step
        for group in step.groups:
            group.forget_masks()
        if step.varlen is not None:
            step.varlen.lengths.copy_(self._positions + 1)
            step.varlen.tables.copy_(step.groups[0].flat_blocks.view(self.batch, self.num_blocks))
        token = attention.CURRENT_STEP.set(step)
        try:
            return self._compute(self._token_ids.unsqueeze(0), self._positions.unsqueeze(0), self._rows)
        finally:
            attention.CURRENT_STEP.reset(token)


class DecodeGraphs:
    """Decode steps by padded batch size and table length, made when they are first needed.

    With the variable-length kernel, which reads no padding, there is one table length.
    """

    def __init__(
        self,
        compute: Forward,
        cache: KvCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        kernel: VarlenKernel | None = None,
        capture: Capture = capture_nothing,
    ) -> None:
        self._compute, self._cache, self._kernel, self._capture = compute, cache, kernel, capture
        self._batches = _doubling(1, max_num_seqs)
        longest = blocks_for(max_model_len, cache.block_size)
        shortest = longest if kernel is not None else blocks_for(_SHORTEST_TABLE, cache.block_size)
        self._tables = _doubling(shortest, longest)
        self._steps: dict[tuple[int, int], DecodeStep] = {}

    def warm_up(self) -> None:
        """Makes every batch size for the shortest tables, the largest first: the others reuse its memory."""
        for batch in reversed(self._batches):
            self._step(batch, self._tables[0])

    def can_run(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether every chunk is one token that samples, and no more than fit."""
        fits = 0 < len(chunks) <= self._batches[-1]
        return fits and all(chunk.num_tokens == 1 and chunk.samples for chunk in chunks)

    def run(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """Logits (S, vocabulary), valid until the next run."""
        num_blocks = max(blocks_for(chunk.end, self._cache.block_size) for chunk in chunks)
        batch = next(size for size in self._batches if size >= len(chunks))
        step = self._step(batch, next(size for size in self._tables if size >= num_blocks))
        step.fill(chunks)
        return step.run()

    def _step(self, batch: int, num_blocks: int) -> DecodeStep:
        key = (batch, num_blocks)
        if key not in self._steps:
            self._steps[key] = DecodeStep(
                self._compute, self._cache, *key, kernel=self._kernel, capture=self._capture
            )
        return self._steps[key]


def _doubling(first: int, last: int) -> list[int]:
    """first, 2 * first, ... and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
