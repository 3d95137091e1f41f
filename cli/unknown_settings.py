"""Finds `BATON_*` variables that nothing reads: mostly settings whose names were mistyped."""

from collections.abc import Iterable
from difflib import get_close_matches

from gateway.settings import GatewaySettings
from services.settings import WorkerSettings

_PREFIX = "BATON_"
# Read by commands and by the telemetry, which have no class of settings.
_OTHERS = ("BATON_API_KEY", "BATON_CACHE_DIR", "BATON_LOG_FORMAT", "BATON_LOG_LEVEL", "BATON_OTLP_ENDPOINT")
_LIKENESS = 0.8  # a letter or two amiss


def unknown_settings(names: Iterable[str]) -> list[str]:
    """One notice for each variable that no process and no command reads, in order of their names."""
    fields = {*WorkerSettings.model_fields, *GatewaySettings.model_fields}
    known = [*(_PREFIX + field.upper() for field in fields), *_OTHERS]
    notices = []
    for name in sorted(names):
        if name.startswith(_PREFIX) and name not in known:
            close = get_close_matches(name, known, 1, _LIKENESS)
            hint = f"; did you mean {close[0]}?" if close else ""
            notices.append(f"{name} is no setting and is ignored{hint}")
    return notices
