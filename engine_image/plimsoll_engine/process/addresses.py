"""Remove memory addresses from messages to clients."""

from __future__ import annotations

import re

_OBJECT_PATTERN = re.compile(r"<([\w.]+)[^<>]*? at 0x[0-9a-fA-F]+>")
_ADDRESS_PATTERN = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")


def remove_addresses(text: str) -> str:
    """Return ``text`` with each address removed and each Python object replaced by its type.

    An example of an object is ``<_io.BytesIO object at 0x7f…>``. Addresses would reveal the heap's
    location, which helps attacks on native libraries.
    """
    return _ADDRESS_PATTERN.sub("0x…", _OBJECT_PATTERN.sub(r"<\1>", text))
