"""kubectl's own reader of files, to compare ours with: ``kubectl_yaml`` in Go, built in seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plimsoll_cli.yaml_text import YamlError
from plimsoll_cli.yaml_tree import split_documents

SOURCE = Path(__file__).parent / "kubectl_yaml"


class Kubectl:
    """Answers with the documents of a file; None where kubectl refuses it."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("go") is None:
            pytest.skip("install Go to compare with kubectl's own reader")
        binary = folder / "kubectl_yaml"
        command = ["go", "build", "-mod=mod", "-o", str(binary), "."]
        done = subprocess.run(command, cwd=SOURCE, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"Go cannot build kubectl's reader: {done.stderr.strip()[-300:]}")
        self._process = subprocess.Popen(
            [binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self, text: str) -> list[Any] | None:
        """The documents of ``text``, without empty ones."""
        ours, theirs = self._process.stdin, self._process.stdout
        assert ours is not None
        assert theirs is not None
        ours.write(json.dumps(text) + "\n")
        ours.flush()
        answer = json.loads(theirs.readline())
        return None if answer["error"] else answer["documents"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=10)


def read(text: str) -> list[Any] | None:
    """What we read: the documents of ``text``, None where it is refused."""
    try:
        roots = [root for one in split_documents(text) if (root := one.parse_root()) is not None]
        return [value for root in roots if (value := root.read_value()) is not None]
    except YamlError:
        return None


def shown(documents: list[Any] | None) -> str:
    """As text, in which 1 and true differ, and 1 and 1.0 do too."""
    return json.dumps(documents, sort_keys=True)
