"""The prompts: English prose written for this, mixed anew for each prompt and cut to one length.

A prompt begins with a text of its own and ends wherever its length is reached, mostly in mid-sentence, so
that the reply goes on with prose.
"""

import random
from importlib.resources import files

from tokenizers import Tokenizer

from bench.errors import BenchFailed
from bench.payload.settings import Settings

Prompt = tuple[int, ...]


def texts() -> list[str]:
    """One paragraph each."""
    return (files("bench.payload") / "texts.txt").read_text(encoding="utf-8").strip().split("\n\n")


def make_prompts(settings: Settings, tokenizer: Tokenizer) -> list[Prompt]:
    """The same for the same settings and tokenizer.

    Raises BenchFailed if the texts do not make so many different ones, or none so long.
    """
    paragraphs = texts()
    source = random.Random(settings.seed)
    prompts = []
    for number in range(settings.prompts):
        first = paragraphs[number % len(paragraphs)]
        others = [paragraph for paragraph in paragraphs if paragraph != first]
        source.shuffle(others)
        token_ids = tokenizer.encode("\n\n".join([first, *others])).ids
        if len(token_ids) < settings.prompt_tokens:
            raise BenchFailed(f"all texts together are {len(token_ids)} tokens; a prompt needs more")
        prompts.append(tuple(token_ids[: settings.prompt_tokens]))
    if len(set(prompts)) < len(prompts):
        raise BenchFailed("two prompts are the same: take longer ones, or fewer")
    return prompts
