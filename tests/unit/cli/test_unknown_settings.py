"""A mistyped setting is named, with what was probably meant."""

import re
from pathlib import Path

from cli.unknown_settings import unknown_settings


def test_what_nothing_reads_is_named() -> None:
    names = ["PATH", "BATON_PREFILL_CHNK", "BATON_PREFILL_CHUNK", "BATON_ZZZ"]
    assert unknown_settings(names) == [
        "BATON_PREFILL_CHNK is no setting and is ignored; did you mean BATON_PREFILL_CHUNK?",
        "BATON_ZZZ is no setting and is ignored",
    ]


def test_every_setting_in_the_readme_is_known() -> None:
    readme = Path(__file__).parents[3] / "README.md"
    names = set(re.findall(r"`(BATON_[A-Z_]+[A-Z])", readme.read_text()))
    assert len(names) > 30
    assert unknown_settings(names) == []
