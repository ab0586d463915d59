"""Install the probe in a folder on the PYTHONPATH of an engine.

    python -m plimsoll_probe.install /plimsoll/probe

vLLM and SGLang load the package through its entry points. All other Python processes load it
through ``sitecustomize``.
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
METADATA_TEMPLATE = "Metadata-Version: 2.1\nName: plimsoll-probe\nVersion: {version}\n"
PACKAGE_VERSION = "1"


def install(folder: Path) -> None:
    """Write all files of the probe to ``folder``, and replace existing ones. Raises OSError."""
    here = Path(__file__).resolve().parent
    shutil.rmtree(folder / "plimsoll_probe", ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "install.py", "sitecustomize.py")
    shutil.copytree(here, folder / "plimsoll_probe", ignore=ignored)
    shutil.copyfile(here / "sitecustomize.py", folder / "sitecustomize.py")
    info = folder / f"plimsoll_probe-{PACKAGE_VERSION}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA_TEMPLATE.format(version=PACKAGE_VERSION))
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def main(arguments: List[str]) -> int:
    """Install the probe in the folder ``arguments[0]``; return the exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m plimsoll_probe.install FOLDER\n")
        return 2
    try:
        install(Path(arguments[0]))
    except OSError as error:
        sys.stderr.write(f"cannot install the probe in {arguments[0]}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
