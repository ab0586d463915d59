"""Whoever writes the admin token first writes it for all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll_api.admin_token import write_token
from plimsoll_api.names import TOKEN_FILE


def test_a_token_is_written_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    assert write_token(str(tmp_path))
    token = tmp_path / TOKEN_FILE
    assert token.stat().st_mode & 0o777 == 0o600
    written = token.read_text()
    assert len(written) == 64
    assert not write_token(str(tmp_path))
    assert token.read_text() == written
    assert os.listdir(tmp_path) == [TOKEN_FILE]


def test_an_empty_file_that_a_full_disk_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / TOKEN_FILE).touch(mode=0o644)
    assert write_token(str(tmp_path))
    assert len((tmp_path / TOKEN_FILE).read_text()) == 64


def test_a_token_that_another_process_writes_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, link = tmp_path / TOKEN_FILE, os.link

    def late(source: str, target: str) -> None:
        token.write_text("the supervisor's")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert not write_token(str(tmp_path))
    assert token.read_text() == "the supervisor's"
    assert os.listdir(tmp_path) == [TOKEN_FILE]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=TOKEN_FILE):
        write_token(str(tmp_path / "missing"))
