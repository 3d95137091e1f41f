"""A folder of models made once: complete or absent, whoever interrupts or races.

A model is built in a folder beside its place and renamed into it, under a lock that the kernel lets go
of when its holder dies. Each folder says which recipe made it; another recipe builds it anew.

Must not know: what a model is or where it comes from.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cli.errors import ModelUnavailable
from cli.terminal import say

_RECIPE = "baton-recipe.txt"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """`BATON_CACHE_DIR`, else `baton` in the user's cache folder."""
    if given := environment.get("BATON_CACHE_DIR"):
        return Path(given).expanduser().resolve()
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "baton"


class ModelCache:
    """The models below one cache folder."""

    def __init__(self, folder: Path) -> None:
        self._models = folder / "models"

    def ensure(self, name: str, recipe: str, build: Callable[[Path], None], needed_bytes: int) -> Path:
        """The model's folder, built if it is not there.

        Args:
            recipe: identifies how the folder is made; a folder of another recipe is replaced.
            build: fills the folder that it is given; called under the lock, at most once.
            needed_bytes: free space without which building is not even begun.

        Raises:
            ModelUnavailable: no space, no permission, or what `build` raises.
        """
        place = self._models / name
        if _recipe_of(place) == recipe:
            return place
        try:
            self._models.mkdir(parents=True, exist_ok=True)
            with self._locked(name):
                if _recipe_of(place) != recipe:  # another process may have built it meanwhile
                    self._build(place, recipe, build, needed_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ModelUnavailable(f"the disk of {self._models} is full; {_WAY_OUT}") from error
            raise ModelUnavailable(f"{self._models} cannot be used: {error}; {_WAY_OUT}") from error
        return place

    def _build(self, place: Path, recipe: str, build: Callable[[Path], None], needed_bytes: int) -> None:
        for left_over in self._models.glob(
            f".{place.name}.*.partial"
        ):  # of interrupted runs: we hold the lock
            shutil.rmtree(left_over, ignore_errors=True)
        free = shutil.disk_usage(self._models).free
        if free < needed_bytes:
            raise ModelUnavailable(
                f"{self._models} has {free // 2**20} MB free and {place.name} needs {needed_bytes // 2**20}; "
                + _WAY_OUT
            )
        draft = self._models / f".{place.name}.{secrets.token_hex(4)}.partial"
        try:
            draft.mkdir()
            build(draft)
            (draft / _RECIPE).write_text(recipe)
            _flush(draft)
            self._put(draft, place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _put(self, draft: Path, place: Path) -> None:
        if place.exists():
            old = self._models / f".{place.name}.{secrets.token_hex(4)}.partial"
            place.rename(old)  # processes that have it open keep it
            draft.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        else:
            draft.rename(place)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self._models / f".{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"model: waiting for another process that is making {name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


_WAY_OUT = "choose another place with BATON_CACHE_DIR, or a model of yours with --model"


def _recipe_of(place: Path) -> str | None:
    try:
        return (place / _RECIPE).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _flush(folder: Path) -> None:
    """To the disk before the rename: a crash must not leave a named folder with empty files."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
