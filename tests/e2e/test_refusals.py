"""`baton up` with a model that cannot be served: the reason on the screen, and nothing left running."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.engine.sim_model import write_sim_model
from tests.e2e.stack import Stack, clean_environment, free_ports

pytestmark = pytest.mark.slow


def _forget_the_head_size(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["head_dim"]
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda model: (model / "chat_template.jinja").unlink(), "no chat_template.jinja"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json"),
        (_forget_the_head_size, "head_dim"),
    ],
)
def test_the_reason_is_shown_and_nothing_stays(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    model = tmp_path / "model"
    write_sim_model(model)
    damage(model)
    stack = Stack(tmp_path, clean_environment(), free_ports(1))
    flags = ("--engine", "sim", "--model", str(model), "--port", str(stack.port))
    result = stack.baton("up", *flags, check=False)
    assert result.returncode != 0
    shown = " ".join((result.stdout + result.stderr).split())  # wherever the lines were wrapped
    assert str(model) in shown
    assert reason in shown
    assert "Traceback" not in shown
    assert stack.status() == []
