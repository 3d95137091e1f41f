"""What ours and transformers can both be asked, so that both are measured by the same code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.engine.workload import Prompt
from bench.errors import BenchFailed


@dataclass(frozen=True, slots=True)
class Timed:
    """Greedy replies and the seconds from asking to the last token of the last one."""

    seconds: float
    replies: tuple[tuple[int, ...], ...]


class Contestant(Protocol):
    """One way to compute greedy replies of a given length."""

    name: str

    async def single(self, prompt: Prompt, num_tokens: int) -> Timed:
        """One reply, alone."""
        ...

    async def batch(self, prompts: Sequence[Prompt], num_tokens: int) -> Timed:
        """All replies, asked for at once."""
        ...


def check_replies(name: str, replies: Sequence[Sequence[int]], num_replies: int, num_tokens: int) -> None:
    """Raises BenchFailed unless there are as many replies as asked for, each as long as asked for."""
    lengths = sorted({len(reply) for reply in replies})
    if len(replies) != num_replies or lengths != [num_tokens]:
        raise BenchFailed(
            f"{name} gave {len(replies)} replies of {lengths} tokens; "
            f"{num_replies} of {num_tokens} were asked for"
        )
