"""The measurement: every prompt's reply without a handover, then along it with each payload format.

One engine stands at both ends, without a prefix cache, and has one sequence at a time: where two runs' logits
differ, nothing but the payload has made them.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.engine.workload import greedy
from bench.errors import BenchFailed
from bench.payload.comparison import Comparison, compare
from bench.payload.handover import Page, Prefilled, go_on, prefill, run_here
from bench.payload.prompts import Prompt, make_prompts
from bench.payload.settings import Settings
from bench.payload.watch import Watch, watched_by
from services.engine.config import EngineConfig
from services.engine.errors import InvalidKvPage
from services.engine.loop import HfEngine
from services.engine.request import EngineRequest
from services.kv import payload
from services.kv.payload import PayloadFormat

Progress = Callable[[str], None]


@dataclass(slots=True)
class Measured:
    """One format; a prompt's comparison stands at the same place in each.

    Attributes:
        narrow_s, widen_s: of each whole page.
    """

    bytes_per_token: int
    comparisons: list[Comparison] = field(default_factory=list)
    narrow_s: list[float] = field(default_factory=list)
    widen_s: list[float] = field(default_factory=list)

    @property
    def equal_share(self) -> float:
        """Of the replies."""
        return statistics.fmean(each.is_equal for each in self.comparisons)

    @property
    def tokens_before_difference(self) -> float:
        """Mean; of an equal reply all of it."""
        return statistics.fmean(each.num_before_difference for each in self.comparisons)

    @property
    def divergences(self) -> list[float]:
        """Of all positions of all replies."""
        return [divergence for each in self.comparisons for divergence in each.divergences]


async def measure(settings: Settings, progress: Progress) -> dict[PayloadFormat, Measured]:
    """By format, of those that are smaller than the cache.

    Raises BenchFailed, above all if a cache that was not narrowed leads to another reply; UnsupportedModel.
    """
    watch = Watch()
    engine = HfEngine(_config(settings), runner_type=watched_by(watch))
    if engine.max_model_len < (needed := settings.prompt_tokens + settings.reply_tokens):
        raise BenchFailed(f"the model holds {engine.max_model_len} tokens; {needed} are needed")
    await engine.start()
    try:
        return await _measure(settings, engine, watch, progress)
    finally:
        await engine.close()


async def _measure(
    settings: Settings, engine: HfEngine, watch: Watch, progress: Progress
) -> dict[PayloadFormat, Measured]:
    layout = engine.cache.layout
    row = (layout.num_layers, 2, 1, layout.num_kv_heads, layout.head_size)
    found = {
        form: Measured(payload.num_bytes(form, row, layout.torch_dtype))
        for form in PayloadFormat
        if payload.effective(form, layout.head_size, layout.torch_dtype) is form
    }
    page_tokens = max(1, settings.page_bytes // layout.bytes_per_token)
    for number, prompt in enumerate(make_prompts(settings, engine.tokenizer)):
        progress(f"prompt {number + 1} of {settings.prompts}")
        request = _request(prompt, settings.reply_tokens)
        watch.begin()
        reply = await run_here(engine, request)
        expected = watch.logits[1:]
        watch.begin()
        prefilled = await prefill(engine, layout, request, page_tokens)
        if prefilled.first_token.token_id != reply[0]:
            raise BenchFailed("the prefill's first token is not the reply's")
        for form, measured in found.items():
            pages = _carry(prefilled, form, measured)
            watch.begin(reply)
            if await go_on(engine, request, prefilled.first_token, pages) != reply:
                raise BenchFailed("the engine did not go along the reply")
            measured.comparisons.append(compare(reply, expected, watch.logits))
    if not all(comparison.is_equal for comparison in found[PayloadFormat.EXACT].comparisons):
        raise BenchFailed("a cache handed over as it is led to another reply than none handed over")
    return found


def _carry(prefilled: Prefilled, form: PayloadFormat, measured: Measured) -> list[Page]:
    """The pages, narrowed and widened again."""
    carried = []
    whole = prefilled.pages[0].kv.numel()
    for page in prefilled.pages:
        kv = page.kv
        memory = memoryview(bytearray(payload.num_bytes(form, kv.shape, kv.dtype)))
        began = time.perf_counter()
        try:
            payload.narrow(kv, form, memory)
        except InvalidKvPage as error:
            raise BenchFailed(f"{form} cannot hold this model's cache: {error}") from error
        narrowed = time.perf_counter()
        widened = payload.widen(memory, form, kv.shape, kv.dtype)
        ended = time.perf_counter()
        if kv.numel() == whole:
            measured.narrow_s.append(narrowed - began)
            measured.widen_s.append(ended - narrowed)
        carried.append(Page(page.where, widened))
    return carried


def _request(prompt: Prompt, reply_tokens: int) -> EngineRequest:
    return EngineRequest(request_id="bench/0", prompt_token_ids=prompt, sampling=greedy(reply_tokens))


def _config(settings: Settings) -> EngineConfig:
    return EngineConfig(
        model=settings.model,
        model_name="bench",
        max_num_seqs=2,  # reservations get half of the pool
        max_model_len=settings.prompt_tokens + settings.reply_tokens,
        prefix_cache=False,
    )
