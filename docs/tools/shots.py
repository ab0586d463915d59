"""Pictures as a person sees them: of a terminal, and of a page in a browser."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from playwright.sync_api import Page

LINES = 50
LIMIT_S = 60.0
CONTROL = re.compile(r"\x1b\[(?:\?\d+[hl]|\d*[AGJK])|\x1b\[\d+;\d+H")
"""What moves the cursor or clears: a spinner's traces, not text."""
SPINNER = re.compile(r"^[^\n]*\r(?!\n)", re.MULTILINE)
FONT = "'DejaVu Sans Mono','Liberation Mono',monospace"


def terminal(command: Sequence[str], columns: int, title: str, file: Path) -> None:
    """Runs ``command`` in a terminal of so many columns and draws what it leaves there.

    RuntimeError where it fails or takes longer than a minute.
    """
    text = CONTROL.sub("", SPINNER.sub("", typed(command, columns))).strip("\n")
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), soft_wrap=True)
    drawn = console.export_svg(title=title)
    # The fonts of this machine: the picture must not depend on a download.
    drawn = re.sub(r"@font-face \{.*?\}\n?", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("Fira Code, monospace", FONT)
    with _page(width=1400) as tab:
        tab.set_content(f"<body style='margin:0'>{drawn}</body>")
        tab.locator("svg").evaluate("one => one.style.width = '1100px'")
        tab.locator("svg").screenshot(path=file, omit_background=True)


def page(
    url: str, file: Path, scheme: Literal["light", "dark"] = "light", width: int = 1000
) -> None:
    """A page of ours; the supervisor's has its newest incident open."""
    with _page(width, scheme) as tab:
        tab.goto(url)
        for first in tab.locator("details").all()[:1]:
            if first.get_attribute("open") is None:
                first.locator("summary").click()
        tab.screenshot(path=file, full_page=True)


@contextlib.contextmanager
def _page(width: int, scheme: Literal["light", "dark"] = "light") -> Iterator[Page]:
    """A tab of the system's Chromium. FileNotFoundError where there is none."""
    from playwright.sync_api import sync_playwright  # slow, and most commands draw no page

    binary = shutil.which("chromium")
    if binary is None:
        raise FileNotFoundError("chromium is missing: apt-get install chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        browser.close()


def typed(command: Sequence[str], columns: int, more: Mapping[str, str] | None = None) -> str:
    """What ``command`` writes to a terminal of so many columns; ``more`` are further variables of
    its environment. RuntimeError where it fails or takes longer than a minute."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    env |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", **(more or {})}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    read, deadline = b"", time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline:
            ready, _, _ = select.select([ours], [], [], 0.5)
            if not ready:
                continue
            try:
                chunk = os.read(ours, 65_536)
            except OSError:  # the last process that had the terminal is gone
                chunk = b""
            if not chunk:
                break
            read += chunk
        if process.wait(max(0.1, deadline - time.monotonic())):
            raise RuntimeError(f"{command!r}: {read.decode(errors='replace')}")
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise RuntimeError(f"{command!r}: not within {LIMIT_S:.0f} s") from None
    finally:
        os.close(ours)
    return read.decode(errors="replace").replace("\r\n", "\n")
