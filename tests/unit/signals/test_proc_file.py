"""Files of /proc are read without entries in the interpreter's table of interned strings.

Tests ``signals/process/proc_file.py``.
"""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from plimsoll_sidecar.signals.process import proc_file
from plimsoll_sidecar.signals.process.open_files import nearest
from plimsoll_sidecar.signals.process.process_id import identify
from plimsoll_sidecar.signals.process.process_table import command_name, parent_of
from plimsoll_sidecar.signals.process.resident_memory import children, cpu_s, resident


def test_a_file_is_read_whole_and_one_that_is_not_there_is_an_error() -> None:
    assert proc_file.read(os.getpid(), "comm").strip().decode() == command_name(os.getpid())
    assert len(proc_file.read(os.getpid(), "maps")) > 4096
    with pytest.raises(OSError, match="No such file"):
        proc_file.read(os.getpid(), "nothing")


def test_what_is_read_with_each_sample_interns_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    interned: list[str] = []
    intern = sys.intern

    class Noting:
        """The module ``sys``, as pathlib sees it."""

        def __getattr__(self, name: str) -> object:
            return getattr(sys, name)

        @staticmethod
        def intern(text: str) -> str:
            interned.append(text)
            return intern(text)

    pid = os.getpid()
    monkeypatch.setattr(sys.modules[pathlib.PurePath.__module__], "sys", Noting())
    str(pathlib.Path("/proc/12345"))
    assert "12345" in interned, "pathlib interns no more: proc_file.py has lost its reason"
    interned.clear()
    assert identify(pid) is not None
    assert parent_of(pid) == os.getppid()
    assert children(pid) is not None
    assert cpu_s(pid) is not None
    assert resident(pid) is not None
    assert nearest({pid: "this"}) is not None
    assert not any(text.isdigit() for text in interned), interned
