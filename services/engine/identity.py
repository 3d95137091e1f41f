"""Which model this is, to the bit, and whether another worker's is the same.

The fingerprint covers configuration, weights and tokenizer, so a KV cache or a stored prompt is never
used with a model that would read it differently.
"""

import json
from pathlib import Path
from typing import Any

import xxhash

from services.engine.errors import IncompatibleModel, UnsupportedModel
from services.engine.kv_cache import KvLayout
from services.engine.request import ModelIdentity

WIRE_VERSION = 4  # of the KvPage layout, and of which pages make a whole
_CHUNK = 1 << 24
# Where a model came from and who wrote the file say nothing about what it computes.
_IRRELEVANT = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version"})


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises UnsupportedModel."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{folder / 'config.json'} cannot be read: {error}") from error
    return config


def make_identity(folder: Path, name: str, layout: KvLayout) -> ModelIdentity:
    """Identity of a model folder, reading every byte of its weights once (about 10 GB/s)."""
    config = read_config(folder)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return ModelIdentity(
        model=name,
        fingerprint=_fingerprint(folder, config),
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        rope=json.dumps(rope, sort_keys=True, separators=(",", ":")) if rope else "",
        wire_version=WIRE_VERSION,
    )


def compatibility_hash(identity: ModelIdentity) -> str:
    """Digest over every field that must match for a KV cache to mean the same."""
    canonical = json.dumps(identity.compared(), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def check_compatible(ours: ModelIdentity, theirs: ModelIdentity) -> None:
    """Raises IncompatibleModel naming the first field that differs."""
    for field, value in ours.compared().items():
        if (other := theirs.compared()[field]) != value:
            raise IncompatibleModel(field, value, other)


def _fingerprint(folder: Path, config: dict[str, Any]) -> str:
    digest = xxhash.xxh3_128()
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    weights = sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    for path in (folder / "tokenizer.json", *weights):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
