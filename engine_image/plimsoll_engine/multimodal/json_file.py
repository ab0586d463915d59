"""The JSON files of a checkpoint that say how its media are processed."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

KEY_BYTES = 16
"""128 bits: a collision would show a request another one's image."""


class UnsupportedError(Exception):
    """The checkpoint asks for what this engine does not do; the message names file and field."""


class JsonFile:
    """A JSON object with errors that name the file and the field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            content = {}
        except (OSError, ValueError) as error:
            raise UnsupportedError(f"{path}: cannot be read: {error}") from None
        if not isinstance(content, dict):
            raise UnsupportedError(f"{path}: expected a JSON object")
        self.content: dict[str, Any] = content

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value at a dotted ``field``, or ``default``."""
        value: Any = self.content
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def integer(self, field: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        value = self.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(field, f"{value!r}: expected a positive whole number")
        return value

    def wrong(self, field: str, why: str) -> UnsupportedError:
        """Return the error that names file and field."""
        return UnsupportedError(f"{self.path}: field {field}: {why}")


def content_key(settings: bytes, data: bytes) -> bytes:
    """Return the hash of a file's content under the processing that ``settings`` names."""
    return blake2b(data, digest_size=KEY_BYTES, key=settings).digest()


def settings_key(*parts: object) -> bytes:
    """Return a key for :func:`content_key` from everything that the processing depends on."""
    return blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()
