"""Reader of a checkpoint's JSON files, and hash functions for the keys of processed media."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

# If two images had the same key, a request could see another one's image.
MEDIA_KEY_BYTES = 16


class UnsupportedCheckpointError(Exception):
    """The checkpoint requires an unsupported feature."""


class JsonFile:
    """JSON object in a file; an empty object if the file does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            content = {}
        except (OSError, ValueError) as error:
            raise UnsupportedCheckpointError(f"cannot read {path}: {error}") from None
        if not isinstance(content, dict):
            raise UnsupportedCheckpointError(f"{path} must contain a JSON object")
        self.content: dict[str, Any] = content

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value of the dotted ``field``, or ``default`` if it is missing or null."""
        value: Any = self.content
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def get_positive_int(self, field: str, default: int | None = None) -> int:
        """Return the integer in ``field``, or ``default`` if it is missing.

        Raises UnsupportedCheckpointError if the value is no positive integer.
        """
        value = self.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.make_error(field, f"must be a positive integer, got {value!r}")
        return value

    def make_error(self, field: str, problem: str) -> UnsupportedCheckpointError:
        """Return an error that names the file and ``field``."""
        return UnsupportedCheckpointError(f"{self.path}: field {field}: {problem}")


def hash_content(settings_hash: bytes, data: bytes) -> bytes:
    """Return the key of a file with the content ``data`` and these processing settings."""
    return blake2b(data, digest_size=MEDIA_KEY_BYTES, key=settings_hash).digest()


def hash_settings(*parts: object) -> bytes:
    """Return a hash of the settings that affect processing."""
    return blake2b(repr(parts).encode(), digest_size=MEDIA_KEY_BYTES).digest()
