"""Remove memory addresses from error messages for clients."""

from __future__ import annotations

import re

_OBJECT_PATTERN = re.compile(r"<([\w.]+)[^<>]*? at 0x[0-9a-fA-F]+>")
_ADDRESS_PATTERN = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")


def remove_addresses(text: str) -> str:
    """Return ``text`` without memory addresses, which would help attacks on native libraries."""
    return _ADDRESS_PATTERN.sub("0x…", _OBJECT_PATTERN.sub(r"<\1>", text))
