"""What is captured computes the same; what is not a fixed sequence of operations is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from services.engine.capture import NotCapturable
from services.engine.graph_model import GraphModel, record
from services.engine.linear_packing import LAYERS
from services.engine.precision import Precision
from services.engine.rotary import rotate


class Small(nn.Module):
    """Two layers that read the same tensor, a reshape by the number of tokens, and a choice of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.gate = nn.Linear(16, 24)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        x = self.embedding(token_ids) + position_ids.unsqueeze(-1)
        batch, count = token_ids.shape
        x = nn.functional.silu(self.gate(x)) * self.up(x)
        x = x.view(batch, count, 4, 6).transpose(1, 2).reshape(batch, 4, count * 6)
        x = x.reshape(batch, 4, count, 6).transpose(1, 2).reshape(batch, count, 24)
        return self.down(x)[:, rows, :]


def inputs(num_tokens: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(num_tokens).unsqueeze(0)
    return ids + 3, ids, torch.arange(num_rows)


@torch.inference_mode()
def capture(function: Callable[..., torch.Tensor], model: nn.Module) -> GraphModel:
    return GraphModel(*(record(function, model, *inputs(*sizes)) for sizes in ((5, 2), (7, 3))))


@pytest.mark.parametrize("packed", [False, True])
@torch.inference_mode()
def test_a_graph_computes_what_the_model_does_for_any_number_of_tokens(*, packed: bool) -> None:
    torch.manual_seed(0)
    model = Small()
    sizes = [(1, 1), (2, 1), (5, 5), (12, 3), (35, 6)]
    expected = [model(*inputs(*size)) for size in sizes]
    graph = capture(model, model)
    assert set(graph.linears) == {model.gate, model.up, model.down}
    if packed:
        graph.pack(LAYERS[Precision.FP32])
        assert model.gate.weight.numel() == 0, "the weights are kept twice"
    for size, logits in zip(sizes, expected, strict=True):
        torch.testing.assert_close(graph(*inputs(*size)), logits)


_BY_SIZE = {5: torch.tensor(1.0), 7: torch.tensor(2.0)}


def _reads_a_value(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ids + 1.0 if ids[0, 0].item() > 0 else ids - 1.0


def _picks_by_mask(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ids[ids > 5]


def _writes_in_place(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (ids + 1.0).mul_(2)


def _draws(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ids + torch.rand_like(ids, dtype=torch.float32)


def _takes_another_path(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ids + 1.0 if ids.shape[1] > 6 else ids * 2.0


def _size_is_no_multiple(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ids.shape[1] + 1) + 1


def _constant_by_size(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ids + _BY_SIZE[ids.shape[1]]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_reads_a_value, "values"),
        (_picks_by_mask, "values"),
        (_writes_in_place, "in place"),
        (_draws, "values"),
        (_takes_another_path, "number of tokens"),
        (_size_is_no_multiple, "no multiple"),
        (_constant_by_size, "number of tokens"),
    ],
)
def test_what_another_step_could_compute_otherwise_is_refused(
    function: Callable[..., torch.Tensor], reason: str
) -> None:
    with pytest.raises(NotCapturable, match=reason):
        capture(function, nn.Module())


@torch.inference_mode()
def test_a_rotation_is_the_same_to_the_bit() -> None:
    x, cos, sin = torch.randn(1, 6, 9, 16), torch.randn(1, 1, 9, 16), torch.randn(1, 1, 9, 16)
    expected = (x * cos) + (torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * sin)
    signed = torch.cat((-sin[..., :8], sin[..., 8:]), dim=-1)
    assert torch.equal(rotate(x, cos, signed, 8), expected)
