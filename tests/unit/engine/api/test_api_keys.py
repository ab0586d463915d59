"""API keys: who may come in, and as whom.

Tests ``api/auth.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll_engine.api.auth import ApiKeys
from plimsoll_engine.errors import UsageError


def write(file: Path, text: str, stamp: int) -> None:
    file.write_text(text)
    os.utime(file, ns=(stamp, stamp))


def test_several_keys_are_several_tenants_and_one_is_none(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "a\n\n  b \n", 1)
    keys = ApiKeys(file)
    assert [keys.get_tenant(f"Bearer {key}".encode()) for key in "ab"] == ["key 1", "key 2"]
    assert [keys.get_tenant(one) for one in (b"bearer a", b"BEARER  b")] == ["key 1", "key 2"]
    for wrong in (b"", b"Bearer ", b"Bearer", b"a", b"Basic a", b"Bearer \xff", b"Bearer ab"):
        assert keys.get_tenant(wrong) is None
    write(file, "c\n", 2)
    assert keys.get_tenant(b"Bearer c") == ""
    assert keys.get_tenant(b"Bearer a") is None


def test_a_file_that_goes_away_leaves_the_last_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, "a\n", 1)
    keys = ApiKeys(file)
    for text in ("", "\n", "é\n"):
        write(file, text, 2 + len(text.encode()))
        assert keys.get_tenant(b"Bearer a") == ""
    file.unlink()
    assert keys.get_tenant(b"Bearer a") == ""


@pytest.mark.parametrize("content", [None, "", "\n \n", "ä"])
def test_no_key_at_the_start_is_an_error_that_names_the_flag(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match="--api-key-file"):
        ApiKeys(file)
