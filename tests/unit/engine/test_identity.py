import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.engine.errors import IncompatibleModel, UnsupportedModel
from services.engine.identity import check_compatible, compatibility_hash, make_identity
from services.engine.kv_cache import KvLayout
from services.engine.sim_model import write_sim_model

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_size=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sim_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_weights_tokenizer_and_configuration_each_count(folder: Path) -> None:
    seen = {make_identity(folder, "m", LAYOUT).fingerprint}
    (folder / "model.safetensors").write_bytes(b"other weights")
    seen.add(make_identity(folder, "m", LAYOUT).fingerprint)
    (folder / "tokenizer.json").write_text("{}")
    seen.add(make_identity(folder, "m", LAYOUT).fingerprint)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5}))
    seen.add(make_identity(folder, "m", LAYOUT).fingerprint)
    for weights in (b"weights", b"other weights"):
        (folder / "pytorch_model.bin").write_bytes(weights)
        seen.add(make_identity(folder, "m", LAYOUT).fingerprint)
    assert len(seen) == 6


def test_where_it_came_from_does_not(folder: Path) -> None:
    before = make_identity(folder, "m", LAYOUT).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"transformers_version": "9", "_name_or_path": "x"})
    )
    assert make_identity(folder, "m", LAYOUT).fingerprint == before


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "bfloat16"), ("num_layers", 3), ("rope", "{}"), ("wire_version", 99)]
)
def test_the_field_that_differs_is_named(folder: Path, field: str, value: object) -> None:
    ours = make_identity(folder, "m", LAYOUT)
    theirs = replace(ours, **{field: value})
    with pytest.raises(IncompatibleModel) as caught:
        check_compatible(ours, theirs)
    assert caught.value.field == field
    assert compatibility_hash(ours) != compatibility_hash(theirs)


def test_a_name_is_only_a_name(folder: Path) -> None:
    ours = make_identity(folder, "m", LAYOUT)
    theirs = replace(ours, model="other")
    check_compatible(ours, theirs)
    assert compatibility_hash(ours) == compatibility_hash(theirs)


def test_an_unreadable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        make_identity(tmp_path, "m", LAYOUT)
