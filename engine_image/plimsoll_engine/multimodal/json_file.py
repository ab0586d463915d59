"""Reader of a checkpoint's JSON files, and hashes that are the keys of processed media."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

KEY_BYTES = 16
"""Size of a key. With a shorter key, a collision could show a request the image of another one."""


class UnsupportedError(Exception):
    """The checkpoint requires an unsupported feature. The message names the file and the field."""


class JsonFile:
    """JSON object in a file; empty if the file does not exist."""

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
        """Return the value of a dotted ``field``; ``default`` if it is missing or null."""
        value: Any = self.content
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def get_positive_int(self, field: str, default: int | None = None) -> int:
        """Return the positive integer in ``field``. Raises UnsupportedError."""
        value = self.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.make_error(field, f"must be a positive integer, not {value!r}")
        return value

    def make_error(self, field: str, why: str) -> UnsupportedError:
        """Return an error that names the file and ``field``."""
        return UnsupportedError(f"{self.path}: field {field}: {why}")


def hash_content(settings: bytes, data: bytes) -> bytes:
    """Return a hash of ``data`` and the processing settings ``settings``."""
    return blake2b(data, digest_size=KEY_BYTES, key=settings).digest()


def hash_settings(*parts: object) -> bytes:
    """Return a hash of ``parts``, all settings that affect processing, for :func:`hash_content`."""
    return blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()
