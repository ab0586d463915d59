"""The tables of the engine's pages that runs made: vLLM's tests, and chat templates.

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
              "samples": {"vllm": "1.2.3", "model": "tiny", "tests": tests}}  # fmt: skip
    lines = entrypoints.listed(result).splitlines()
    assert lines[0].startswith("vLLM 1.2.3 with the model tiny, 2026-11-23, commit 0")
    assert "| `openai/a` | 1 | 0 | 2 |" in lines
    assert "| `openai/b` | 0 | 1 | 0 |" in lines
    assert "- not built: `test_two`" in lines
    assert "- needs the hub: `b`" in lines
    assert lines.index("Failed:") < lines.index("Not applicable:")


def test_chats_are_counted_by_the_form_that_they_are_written_in() -> None:
    chats = {
        "plain": {"as sent": 3, "both refuse": 1},
        "parts": {"parts joined": 3, "different": 1},
    }
    result = {
        "date": "2026-11-26T10:00:00Z",
        "commit": "0123456789",
        "figures": {"templates_count": 4},
        "samples": {"sources": ["a==1"], "chats": chats},
    }
    lines = entrypoints.templates(result).splitlines()
    assert lines[0] == "4 templates, 2026-11-26, commit 0123456, of a==1:"
    assert lines[2] == "| Chat | As sent | Both refuse | Parts joined | Different |"
    assert lines[4:] == ["| plain | 3 | 1 | 0 | 0 |", "| parts | 0 | 0 | 3 | 1 |"]


def test_clients_have_a_row_each() -> None:
    seen = [
        {"library": "a", "version": "1", "case": "chat", "outcome": "passed", "got": "4 tokens"},
        {"library": "a", "version": "1", "case": "cancel", "outcome": "failed", "got": ""},
        {"library": "b", "version": "2", "case": "cancel", "outcome": "passed", "got": ""},
    ]
    result = {"date": "2026-11-23T10:00:00Z", "commit": "0123456789", "samples": seen}
    lines = entrypoints.clients(result).splitlines()
    assert lines[-3:] == ["|---|---|---|", "| `a 1` | passed | failed |", "| `b 2` |  | passed |"]


def test_an_outcome_without_a_reason_is_unexplained() -> None:
    assert verdict("a.py::test", "passed", "") == Row("a.py::test", "passed", "")
    assert verdict("a.py::test", "skipped", "no GPU").verdict == "not applicable"
    assert verdict("a.py::test", "failed", "assert 1 == 2").verdict == "unexplained"
    pattern, found, why = VERDICTS[0]
    assert verdict(pattern, "failed", "") == Row(pattern, found, why)
    assert {found for _, found, _ in VERDICTS} <= {"failed", "not applicable"}
