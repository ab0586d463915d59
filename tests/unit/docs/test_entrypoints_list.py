"""The list of vLLM's tests says of each what its outcome was, and why.

Tests ``docs/tools/entrypoints.py``.
"""

from __future__ import annotations

from docs.tools import entrypoints
from tests.conformance.entrypoints_verdicts import VERDICTS, Row, verdict


def test_files_are_counted_and_reasons_have_their_tests() -> None:
    rows = [
        Row("openai/a.py::test_one[model]", "passed", ""),
        Row("openai/a.py::test_two[1]", "failed", "not built"),
        Row("openai/a.py::test_two[2]", "failed", "not built"),
        Row("openai/b.py", "not applicable", "needs the hub"),
    ]
    tests = [row._asdict() for row in rows]
    result = {"date": "2026-11-23T10:00:00Z", "commit": "0123456789", "command": "python -m b",
              "samples": {"vllm": "1.2.3", "tests": tests}}  # fmt: skip
    lines = entrypoints.listed(result).splitlines()
    assert lines[0].startswith("vLLM 1.2.3, 2026-11-23, commit 0123456")
    assert "| `openai/a` | 1 | 0 | 2 |" in lines
    assert "| `openai/b` | 0 | 1 | 0 |" in lines
    assert "- not built: `test_two`" in lines
    assert "- needs the hub: `b`" in lines
    assert lines.index("Failed:") < lines.index("Not applicable:")


def test_an_outcome_without_a_reason_is_unexplained() -> None:
    assert verdict("a.py::test", "passed", "") == Row("a.py::test", "passed", "")
    assert verdict("a.py::test", "skipped", "no GPU").verdict == "not applicable"
    assert verdict("a.py::test", "failed", "assert 1 == 2").verdict == "unexplained"
    pattern, found, why = VERDICTS[0]
    assert verdict(pattern, "failed", "") == Row(pattern, found, why)
    assert {found for _, found, _ in VERDICTS} <= {"failed", "not applicable"}
