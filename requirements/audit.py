"""Known vulnerabilities in what we ship and build with: ``make audit``.

pip-audit asks PyPI about each locked version. The exit status is 0 where it knows of nothing, 1
where a version is vulnerable, 2 where versions could not be asked about: a mirror of packages has
no database of vulnerabilities, and silence would look like health.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
AUDIT = ("uv", "tool", "run", "--from", "pip-audit==2.10.1", "pip-audit")
FLAGS = ("--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off")
TIMEOUT_S = 900


class Unaudited(Exception):
    """The database did not answer; the message says for what."""


def audit(file: Path) -> list[str]:
    """A line for each vulnerability of the versions in ``file``. Raises :class:`Unaudited`."""
    command = [Path(sys.executable).with_name(AUDIT[0]), *AUDIT[1:], *FLAGS, "-r", file]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise Unaudited(f"{file.name}: pip-audit says: {done.stderr.strip()[-500:]}") from None
    skipped = [one["name"] for one in dependencies if "skip_reason" in one]
    if skipped:
        raise Unaudited(
            f"{file.name}: PyPI's database of vulnerabilities did not know {len(skipped)} of"
            f" {len(dependencies)} packages ({', '.join(skipped[:3])}…): run it where"
            " PyPI itself can be reached, not a mirror of its packages alone"
        )
    return [
        f"{file.name}: {one['name']} {one['version']}: {found['id']},"
        f" fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for one in dependencies
        for found in one.get("vulns", ())
    ]


def main() -> int:
    found: list[str] = []
    unaudited: list[str] = []
    for file in sorted(FOLDER.glob("*.txt")):
        try:
            found += audit(file)
        except Unaudited as error:
            unaudited.append(str(error))
    for line in (*found, *unaudited):
        sys.stderr.write(f"{line}\n")
    return 1 if found else 2 if unaudited else 0


if __name__ == "__main__":
    sys.exit(main())
