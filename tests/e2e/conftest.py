"""Stacks shared by the end-to-end tests: one simulated, one with the real model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.model import ensure_default_model
from tests.e2e.stack import Stack, running_stack


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, fetched and converted if this machine has not done so yet."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways, one decode, one prefill, simulated: 2 ms a token, so that cuts fall in mid-stream."""
    folder = tmp_path_factory.mktemp("sim")
    flags = ("--engine", "sim", "--sim-token-ms", "2", "--sim-jitter-ms", "1")
    with running_stack(folder, *flags, gateways=2, resume_grace_s="20", local_prefill="never") as stack:
        yield stack


@pytest.fixture(scope="session")
def real_stack(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Stack]:
    """The real model, split; decode may not run prompts of its own."""
    folder = tmp_path_factory.mktemp("real")
    with running_stack(folder, "--model", str(model_folder), local_prefill="never") as stack:
        yield stack
