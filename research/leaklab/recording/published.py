"""The recordings that are published: where each lies, and how it was made.

    python -m leaklab.recording.published FOLDER...    # adds what the rig wrote there

``research/leaklab/recordings`` has a folder for each part, with traces and labels; ``runs.json``
says how each was made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from leaklab.recording.labels import Labels
from leaklab.recording.split import DRAWN

FOLDER = Path(__file__).resolve().parents[1] / "recordings"
RUNS = FOLDER / "runs.json"
TRACE, LABELS, ABOUT = ".jsonl.gz", ".labels.json", ".run.json"


@dataclass(frozen=True)
class Recording:
    """``about`` is what the rig said of it."""

    name: str
    trace: Path
    labels: Labels
    about: dict[str, Any]

    @property
    def seen(self) -> bool:
        """Whether it may be looked at: it is not of the part that is judged once."""
        return bool(self.about["part"] != DRAWN)


def recordings() -> Iterator[Recording]:
    """All of them, by name."""
    for name, about in sorted(json.loads(RUNS.read_bytes()).items()):
        trace = FOLDER / about["part"] / f"{name}{TRACE}"
        labels = trace.with_name(f"{name}{LABELS}").read_bytes()
        yield Recording(name, trace, msgspec.json.decode(labels, type=Labels), about)


def add(folder: Path) -> list[str]:
    """Copy what the rig wrote into ``folder``, and return the names; it replaces what has them."""
    runs = json.loads(RUNS.read_bytes()) if RUNS.exists() else {}
    names = []
    for file in sorted(folder.glob(f"*{ABOUT}")):
        name = file.name.removesuffix(ABOUT)
        about = runs[name] = json.loads(file.read_bytes())
        part = FOLDER / about["part"]
        part.mkdir(parents=True, exist_ok=True)
        for ending in (TRACE, LABELS):
            shutil.copyfile(file.with_name(f"{name}{ending}"), part / f"{name}{ending}")
        names.append(name)
    RUNS.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n")
    return names


def main() -> int:
    """Add the recordings of the folders."""
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parse.add_argument("folders", nargs="+", type=Path)
    for folder in parse.parse_args().folders:
        print(folder, *add(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
