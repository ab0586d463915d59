"""Tests ``download/hub.py``: how much memory hf-xet may take, as hf-xet itself reads it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll_engine.download.hub import XET_BUFFER_DIVISORS, limit_buffers

ROOT = Path(__file__).parents[4]
PREFIX = "HF_XET_RECONSTRUCTION_"
READ = "import hf_xet, json; print(json.dumps(dict(hf_xet.XetConfig()), default=str))"


def buffers(environ: dict[str, str]) -> dict[str, int]:
    """What a process with these variables would hold, by the name of the setting."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    done = subprocess.run(
        [sys.executable, "-c", READ], env=others | environ, capture_output=True, check=True
    )
    read = json.loads(done.stdout)
    return {
        name: read[f"reconstruction.{name.removeprefix(PREFIX).lower()}"]
        for name in XET_BUFFER_DIVISORS
    }


@pytest.mark.parametrize("headroom", [1 << 30, 2 << 30, 64 << 30])
def test_hf_xet_holds_a_quarter_of_what_is_free_at_most(headroom: int) -> None:
    environ: dict[str, str] = {}
    limit_buffers(environ, headroom)
    found = buffers(environ)
    whole = min(headroom // 4, 2_000_000_000)
    assert found == {name: whole // part for name, part in XET_BUFFER_DIVISORS.items()}
    assert found[f"{PREFIX}DOWNLOAD_BUFFER_LIMIT"] <= headroom // 4


def test_what_a_person_sets_stays_and_without_a_figure_nothing_is_set() -> None:
    name = f"{PREFIX}DOWNLOAD_BUFFER_LIMIT"
    environ = {name: "223456789"}
    limit_buffers(environ, 1 << 30)
    assert buffers(environ)[name] == 223456789
    environ = {}
    limit_buffers(environ, None)
    assert environ == {}


LOCKED_ONLY = """
import sys
from importlib.metadata import packages_distributions
locked = set(sys.argv[1:])
names = lambda found: {one.lower().replace("_", "-") for one in found}
absent = {top for top, found in packages_distributions().items() if not names(found) & locked}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
assert "torch" in absent
from plimsoll_engine.download import __main__, hub, s3
"""
"""Imports the download where only the packages named by the arguments are installed."""


def test_a_download_needs_nothing_but_the_packages_of_the_supervisors_image() -> None:
    lock = (ROOT / "requirements" / "sidecar.txt").read_text()
    locked = re.findall(r"(?m)^([a-z0-9._-]+)==", lock)

    def imports(*packages: str) -> str:
        command = [sys.executable, "-c", LOCKED_ONLY, "plimsoll", *packages]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr

    assert imports(*locked) == ""
    assert "huggingface_hub" in imports(*(one for one in locked if one != "huggingface-hub"))
