"""Make printable lines of untrusted texts: from the kubelet, a driver, a log or a manifest."""

from __future__ import annotations

import re
import unicodedata

MAX_LINE_CHARS = 400
MAX_LOG_LINES = 3

_ANSI_ESCAPE_PATTERN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def make_printable_line(text: str, limit: int = MAX_LINE_CHARS) -> str:
    """Return the start of ``text`` as one printable line of at most ``limit`` characters."""
    line = _remove_control_characters(_ANSI_ESCAPE_PATTERN.sub("", text[: 8 * limit]))
    return line if len(line) <= limit else f"{line[: limit - 3].rstrip()}..."


def join_last_lines(text: str) -> str:
    """Return the last lines of a log as one line of at most :data:`MAX_LINE_CHARS`."""
    limit = MAX_LINE_CHARS
    lines = [
        _remove_control_characters(line)
        for line in _ANSI_ESCAPE_PATTERN.sub("", text[-8 * limit :]).splitlines()
    ]
    whole = " | ".join([line for line in lines if line][-MAX_LOG_LINES:])
    return whole if len(whole) <= limit else f"...{whole[3 - limit :].lstrip()}"


def _remove_control_characters(text: str) -> str:
    kept = (" " if unicodedata.category(character)[0] in "CZ" else character for character in text)
    return " ".join("".join(kept).split())
