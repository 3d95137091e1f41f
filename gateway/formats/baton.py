"""The native format: every event as it stands in the log, with contiguous IDs."""

import orjson

from gateway.events import Event, EventKind
from gateway.formats import Frame
from gateway.keepalive import KeepaliveMode


class BatonFormat:
    """`event: <kind>`, data a JSON object with `seq`, `kind` and the kind's fields."""

    keepalive_mode = KeepaliveMode.COMMENT_BLOCK

    def is_first_frame(self, event: Event) -> bool:
        return event.kind is EventKind.CREATED

    def render(self, event: Event) -> Frame:
        return Frame(
            orjson.dumps({"seq": event.seq, "kind": event.kind, **event.payload}), name=event.kind.value
        )
