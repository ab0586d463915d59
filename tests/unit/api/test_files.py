"""Files that others can write to are read and replaced as a whole.

Tests ``plimsoll_api/files.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll_api.files import open_regular_file, replace_file


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    found = open_regular_file(tmp_path / "file")
    assert found is not None
    with found:
        assert found.read() == b"text"
    assert open_regular_file(tmp_path / "pipe") is None, "and a pipe without a writer does not hang"
    assert open_regular_file(tmp_path) is None
    for name in ("link", "absent"):
        with pytest.raises(OSError, match=name):
            open_regular_file(tmp_path / name)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in (b"first", b"second"):
        replace_file(path, text)
        assert path.read_bytes() == text
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", b"text")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]
