"""What large images took goes back to the kernel, in a process of its own: the rule is for all.

Tests ``process/host_memory.py``.
"""

from __future__ import annotations

import subprocess
import sys

DECODE = """
import io, sys
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from plimsoll_engine.process import host_memory
from plimsoll_engine.multimodal import images

if sys.argv[1] == "returned":
    assert host_memory.set_mmap_threshold()
file = io.BytesIO()
Image.new("1", (6300, 6300)).save(file, "PNG")
before = host_memory.read_rss_anon_bytes()
with ThreadPoolExecutor(2) as threads:
    for _ in range(2):
        sizes = list(threads.map(lambda data: images.decode(data).size, [file.getvalue()] * 2))
        assert sizes == [(6300, 6300)] * 2
    print(host_memory.read_rss_anon_bytes() - before)
"""
MIB = 1 << 20


def left(rule: str) -> int:
    """Bytes that two images of 40 million pixels, twice, leave behind."""
    done = subprocess.run(
        [sys.executable, "-c", DECODE, rule], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_large_images_leave_nothing_behind() -> None:
    assert left("kept") > 64 * MIB  # what the rule is for
    assert left("returned") < 32 * MIB
