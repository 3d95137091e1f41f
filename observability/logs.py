"""Logging of a process: one line per event, JSON for machines, coloured for a terminal.

Everything goes to stderr through one structlog chain, the standard library's loggers included, and
carries the IDs of the current span. Callers pass identifiers and numbers; never prompt or reply text.
"""

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from opentelemetry import trace

# Libraries that would log every request or every retry against a collector that is down.
_QUIET = {
    "opentelemetry.exporter": logging.ERROR,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "asyncio": logging.WARNING,
}


def configure(name: str, stream: TextIO | None = None) -> None:
    """Sets up logging for this process.

    Args:
        name: the process, in every line as `service`.
        stream: where lines go; stderr if not given.

    `BATON_LOG_FORMAT` is `json` or `console`; without it a terminal gets console, a file JSON.
    `BATON_LOG_LEVEL` is a level's name, INFO if absent. SystemExit for any other value.
    """
    stream = stream or sys.stderr
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _adder("service", name),
        add_trace_ids,
    ]
    # Not cached: a logger in use before (a test's, an importing module's) must follow.
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(stream),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_level())
    for library, level in _QUIET.items():
        logging.getLogger(library).setLevel(level)


def add_trace_ids(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Adds `trace_id` and `span_id` (hex, as trace viewers show them) while a span is current."""
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = trace.format_trace_id(context.trace_id)
        event["span_id"] = trace.format_span_id(context.span_id)
    return event


def _adder(key: str, value: str) -> structlog.types.Processor:
    def add(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault(key, value)
        return event

    return add


def _renderers(stream: TextIO) -> list[structlog.types.Processor]:
    chosen = os.environ.get("BATON_LOG_FORMAT", "").lower() or ("console" if stream.isatty() else "json")
    if chosen == "console":
        return [structlog.dev.ConsoleRenderer(colors=stream.isatty())]
    if chosen == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    raise SystemExit(f"BATON_LOG_FORMAT must be json or console, not {chosen!r}")


def _level() -> int:
    name = os.environ.get("BATON_LOG_LEVEL", "INFO").upper()
    level = logging.getLevelNamesMapping().get(name)
    if level is None:
        raise SystemExit(f"BATON_LOG_LEVEL must be a level's name such as INFO or DEBUG, not {name!r}")
    return level
