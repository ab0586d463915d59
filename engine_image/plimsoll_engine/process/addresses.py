"""Messages for others without addresses of this process's memory."""

from __future__ import annotations

import re

_OBJECT = re.compile(r"<([\w.]+)[^<>]*? at 0x[0-9a-fA-F]+>")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")


def without_addresses(text: str) -> str:
    """Return ``text`` with Python's names of objects cut to their kind.

    ``<_io.BytesIO object at 0x7f…>`` is such a name. An address tells where the heap lies, which an
    attack on a native library needs.
    """
    return _ADDRESS.sub("0x…", _OBJECT.sub(r"<\1>", text))
