"""Every process logs in one format: JSON lines with the same keys."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

from plimsoll_api.logs import JsonFormatter

ROOT = Path(__file__).parents[3]
PLAIN = {"engine_image/plimsoll_engine/download/__main__.py"}
"""Its lines are for the init container's reader, and the last one is its result."""


def _line(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = json.loads(JsonFormatter().format(record))
    return found


def test_a_line_has_time_level_logger_and_message_first() -> None:
    record = logging.LogRecord("a.b", logging.WARNING, "f", 1, "%d left", (3,), None)
    record.created = 1_800_000_000.25
    assert _line(record) == {
        "ts": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "logger": "a.b",
        "message": "3 left",
    }


def test_extras_follow_and_a_traceback_is_the_exception() -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    record.pid, record.path = 7, Path("/x")
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert list(found) == ["ts", "level", "logger", "message", "pid", "path", "exception"]
    assert found["path"] == "/x", "what JSON does not know is written as text"
    assert found["exception"].endswith("line one\nline two")


def test_a_process_writes_it(tmp_path: Path) -> None:
    missing = tmp_path / "kubeconfig"
    command = [sys.executable, "-m", "plimsoll_operator.main", "run", "--kubeconfig", str(missing)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert all(list(line) == ["ts", "level", "logger", "message"] for line in lines), lines
    assert str(missing) in lines[-1]["message"]


def test_a_warning_of_a_library_is_a_line_as_well() -> None:
    code = (
        "import warnings; from plimsoll_api.logs import configure_logging; "
        "configure_logging(); warnings.warn('Corrupt EXIF data.\\nOnly 8 bytes')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    line = json.loads(ended.stderr)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "Corrupt EXIF data.\nOnly 8 bytes" in line["message"]


def test_no_process_has_a_format_of_its_own() -> None:
    own = re.compile(r"basicConfig\(|logging\.(Formatter|StreamHandler)\b")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("operator", "sidecar", "engine_image", "cli", "crds")
        for path in (ROOT / folder).rglob("*.py")
        if own.search(path.read_text())
    }
    assert found == PLAIN | {"crds/plimsoll_api/logs.py"}


def test_no_process_of_the_engine_prints() -> None:
    """Only programs that a person or the kubelet runs answer in plain text."""
    engine = ROOT / "engine_image" / "plimsoll_engine"
    found = {
        str(path.relative_to(engine))
        for path in engine.rglob("*.py")
        if re.search(r"\bprint\(|excepthook\(", path.read_text())
    }
    assert found == {"__main__.py", "download/source.py", "prestop.py"}
