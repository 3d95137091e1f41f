"""The formats by their names, as they stand in `?format=` and in a reply's meta."""

from typing import Any

from gateway.event_log import ReplyMeta
from gateway.formats import Format
from gateway.formats.baton import BatonFormat
from gateway.formats.chat import ChatFormat


def format_named(name: str, meta: ReplyMeta) -> Format | None:
    """The rendering of a reply; None for a name that is no format's."""
    options: dict[str, Any] = meta.format_options if name == meta.format else {}
    if name == "chat":
        return ChatFormat(meta, include_usage=bool(options.get("include_usage")))
    if name == "baton":
        return BatonFormat()
    return None
