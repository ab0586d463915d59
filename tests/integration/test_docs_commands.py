"""What the documents tell a person to run on this machine is run, as it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.tools.blocks import ROOT, Block, blocks, documents

MARKED = [block for path in documents() for block in blocks(path, "sh") if block.run == "local"]


def test_there_are_commands_to_run() -> None:
    assert len(MARKED) >= 2


@pytest.mark.long
@pytest.mark.parametrize("block", MARKED, ids=lambda block: block.place)
def test_commands_run(block: Block, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", block.text],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PATH": path, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
