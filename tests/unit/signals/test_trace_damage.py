"""A trace that is damaged in any way is an error that names its file, never a traceback.

Tests ``plimsoll_api/trace.py``.
"""

from __future__ import annotations

import contextlib
import gzip
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_api import trace
from plimsoll_api.trace import EngineInfo, Header, Sample, TraceError

HEADER = Header(trace=1, name="n", engine=EngineInfo("vllm"), started_at="", interval_s=1.0)
LINES = [
    msgspec.json.encode(HEADER),
    *(msgspec.json.encode(Sample(t=t, epoch=1)) for t in range(9)),
]
WHOLE = b"\n".join(LINES) + b"\n"


def read(path: Path) -> int:
    return len(list(trace.read(path)[1]))


@settings(max_examples=300, deadline=None)
@given(at=st.floats(0, 1), data=st.binary(max_size=40), cut=st.booleans(), packed=st.booleans())
def test_any_damage_is_reported(at: float, data: bytes, cut: bool, packed: bool) -> None:
    content = bytearray(gzip.compress(WHOLE) if packed else WHOLE)
    start = int(at * len(content))
    content[start : len(content) if cut else start + len(data)] = data
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("t.jsonl.gz" if packed else "t.jsonl")
        path.write_bytes(content)
        with contextlib.suppress(TraceError):
            read(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [(b'{"x":' + b"[" * 100_000, "t.jsonl.gz:2"), (b" " * (64 << 20), "longer than 4 MiB")],
)
def test_a_bomb_is_refused(tmp_path: Path, line: bytes, told: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(LINES[0] + b"\n" + line))
    with pytest.raises(TraceError, match=told):
        read(path)
