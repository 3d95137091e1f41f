"""transformers, as it comes: `generate` for one stream, `generate_batch` for many.

fp32, greedy, the default attention, the same number of threads. The continuous batching manager is kept
from run to run, so that making its cache is counted nowhere; it gets our engine's token budget of a step
(its default would put all prompts into one step with one mask, which is slower on a CPU) and a cache
that holds all requests at once.
"""

import contextlib
import logging
import time
from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.engine.contestant import Timed, check_replies
from bench.engine.settings import PEER_BATCH, Settings
from bench.engine.workload import Prompt
from bench.errors import BenchFailed

_NO_EOS = -1  # no token is: replies reach their full length
_PAGE_SIZE = 64


class Transformers:
    """A contestant."""

    name = "transformers"

    def __init__(self, settings: Settings, max_batched_tokens: int) -> None:
        transformers.utils.logging.set_verbosity_error()  # it warns of an EOS that never comes
        transformers.utils.logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).eval()
        pages = -(-(settings.peer_prompt + settings.peer_tokens) // _PAGE_SIZE) + 1
        self._batching = ContinuousBatchingConfig(
            page_size=_PAGE_SIZE,
            num_blocks=pages * PEER_BATCH,
            max_batch_tokens=max_batched_tokens,
        )
        self._most_tokens = settings.peer_tokens

    async def single(self, prompt: Prompt, num_tokens: int) -> Timed:
        """See `Contestant.single`. Holds the event loop up: nothing else runs beside it."""
        ids = torch.tensor([prompt])
        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=_greedy(num_tokens)
            )
        seconds = time.perf_counter() - began
        return self._timed(seconds, [output[0, len(prompt) :].tolist()], 1, num_tokens)

    async def batch(self, prompts: Sequence[Prompt], num_tokens: int) -> Timed:
        """See `Contestant.batch`. Holds the event loop up: nothing else runs beside it."""
        began = time.perf_counter()
        results = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=_greedy(self._most_tokens),
            continuous_batching_config=self._batching,
            persistent_manager=True,
            progress_bar=False,
            max_new_tokens=num_tokens,
        )
        seconds = time.perf_counter() - began
        if errors := [result.error for result in results.values() if result.error]:
            raise BenchFailed(f"transformers failed: {errors[0]}")
        replies = [list(result.generated_tokens) for result in results.values()]
        return self._timed(seconds, replies, len(prompts), num_tokens)

    def close(self) -> None:
        """Ends the manager and its thread."""
        with contextlib.suppress(AttributeError):  # never made, if no batch was run
            self._model.destroy_cached_continuous_batching_manager()

    def _timed(self, seconds: float, replies: list[list[int]], num_replies: int, num_tokens: int) -> Timed:
        check_replies(self.name, replies, num_replies, num_tokens)
        return Timed(seconds, tuple(map(tuple, replies)))


def _greedy(num_tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=_NO_EOS, pad_token_id=0)
