"""A disk that takes nothing: the mark of a complete checkpoint is whole or not there.

Tests ``download/target.py``.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from plimsoll_engine.download import __main__ as command
from plimsoll_engine.download import s3
from plimsoll_engine.download.target import COMPLETE_MARKER, mark_complete, read_complete_version


def test_a_full_disk_leaves_no_empty_mark(tmp_path: Path) -> None:
    (tmp_path / f"{COMPLETE_MARKER}.new").symlink_to("/dev/full")  # each write to it finds no space
    with pytest.raises(OSError, match="No space left"):
        mark_complete(tmp_path, "one")
    assert read_complete_version(tmp_path) is None
    (tmp_path / f"{COMPLETE_MARKER}.new").unlink()
    mark_complete(tmp_path, "one")
    assert read_complete_version(tmp_path) == "one"


def test_a_target_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "model"  # below a file no folder can be made

    def download(uri: str, into: Path) -> str:
        into.mkdir(parents=True, exist_ok=True)
        return "version"

    monkeypatch.setattr(s3, "download", download)
    with caplog.at_level(logging.ERROR):
        assert command.main(["--s3", "s3://bucket/model", "--to", str(target)]) == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"cannot write to {target}: Not a directory" in line
