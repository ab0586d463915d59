"""Copies the probe into a folder on the PYTHONPATH of an engine.

    python -m plimsoll_probe.install /plimsoll/probe

The folder gets the package, the entry points through which vLLM and SGLang load it, and a
``sitecustomize`` for all other Python processes.
"""

import shutil
import sys
from pathlib import Path
from typing import List

ENTRY_POINTS = """\
[vllm.general_plugins]
plimsoll_probe = plimsoll_probe:start

[sglang.srt.plugins]
plimsoll_probe = plimsoll_probe:start
"""
METADATA = "Metadata-Version: 2.1\nName: plimsoll-probe\nVersion: {version}\n"
PACKAGE_VERSION = "1"


def install(folder: Path) -> None:
    """Write all files, and replace those from an earlier start of the pod."""
    here = Path(__file__).resolve().parent
    shutil.rmtree(folder / "plimsoll_probe", ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "install.py", "sitecustomize.py")
    shutil.copytree(here, folder / "plimsoll_probe", ignore=ignored)
    shutil.copyfile(here / "sitecustomize.py", folder / "sitecustomize.py")
    info = folder / f"plimsoll_probe-{PACKAGE_VERSION}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA.format(version=PACKAGE_VERSION))
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def main(arguments: List[str]) -> int:
    """Copy the probe into the folder in the arguments; return the exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m plimsoll_probe.install FOLDER\n")
        return 2
    try:
        install(Path(arguments[0]))
    except OSError as error:
        sys.stderr.write(f"cannot copy the probe to {arguments[0]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
