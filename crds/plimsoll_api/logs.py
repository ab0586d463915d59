"""Structured logs of all processes: one JSON object per line, on standard error.

Each line has ``ts`` (RFC 3339, UTC), ``level``, ``logger`` and ``message``, then the fields passed
as ``extra``, and ``exception`` with the traceback of an error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "color_message",
}


class JsonFormatter(logging.Formatter):
    """Formatter of log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, without a trailing newline."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "ts": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logging(level: str = "INFO", libraries: Mapping[str, str] | None = None) -> None:
    """Write logs and Python's warnings as JSON; ``libraries`` are log levels by logger name."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name, least in (libraries or {}).items():
        logging.getLogger(name).setLevel(least)
