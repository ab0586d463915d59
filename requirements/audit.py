"""Known vulnerabilities in what we ship and build with: ``make audit``.

pip-audit asks PyPI about each locked version. The exit status is 0 where it knows of nothing that
affects us, 1 where a version is vulnerable, 2 where versions could not be asked about: a mirror of
packages has no database of vulnerabilities, and silence would look like health.

``vex.toml`` has what we found out about vulnerabilities that do not affect us. A release tells its
users the same, as OpenVEX.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
ASSESSED = FOLDER / "vex.toml"
AUDIT = ("uv", "tool", "run", "--from", "pip-audit==2.10.1", "pip-audit")
FLAGS = ("--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off")
TIMEOUT_S = 900
CONTEXT = "https://openvex.dev/ns/v0.2.0"


class Unaudited(Exception):
    """The database did not answer; the message says for what."""


class Vulnerability(NamedTuple):
    """A known one of a locked version. ``lock`` is the name of the file without its suffix."""

    lock: str
    package: str
    version: str
    id: str
    fixed: tuple[str, ...]

    def __str__(self) -> str:
        fixed = ", ".join(self.fixed) or "no version"
        return f"{self.lock}.txt: {self.package} {self.version}: {self.id}, fixed in {fixed}"


def audit(file: Path) -> list[Vulnerability]:
    """Ask about the versions in ``file``. Raises :class:`Unaudited`."""
    uv = Path(sys.executable).with_name(AUDIT[0])
    command: list[str | Path] = [uv, *AUDIT[1:], *FLAGS, "-r", file]
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
        Vulnerability(
            file.stem, one["name"], one["version"], found["id"], tuple(found["fix_versions"])
        )
        for one in dependencies
        for found in one.get("vulns", ())
    ]


def assessed() -> dict[str, dict[str, str]]:
    """Return what ``vex.toml`` says, by the identifier of the vulnerability."""
    return tomllib.loads(ASSESSED.read_text())


def affecting(
    found: Iterable[Vulnerability], known: Mapping[str, Mapping[str, str]]
) -> list[Vulnerability]:
    """Return the vulnerabilities of which nobody has found that they do not affect us."""
    return [one for one in found if known.get(one.id, {}).get("status") != "not_affected"]


def openvex(
    found: Mapping[str, Sequence[Vulnerability]],
    known: Mapping[str, Mapping[str, str]],
    version: str,
    timestamp: str,
) -> dict[str, Any] | None:
    """Return an OpenVEX document about a release; None without vulnerabilities, which has no form.

    ``found`` maps the name of an image to the vulnerabilities of its lock.
    """
    statements = [
        {
            "vulnerability": {"name": one.id},
            "products": [
                {
                    "@id": f"pkg:oci/{image}?tag={version}",
                    "subcomponents": [{"@id": f"pkg:pypi/{one.package}@{one.version}"}],
                }
            ],
            **known.get(one.id, {"status": "under_investigation"}),
        }
        for image, several in found.items()
        for one in several
    ]
    if not statements:
        return None
    return {
        "@context": CONTEXT,
        "@id": f"https://plimsoll.dev/openvex/{version}",
        "author": "The maintainers of Plimsoll",
        "timestamp": timestamp,
        "version": 1,
        "statements": statements,
    }


def main() -> int:
    found: list[Vulnerability] = []
    unaudited: list[str] = []
    for file in sorted(FOLDER.glob("*.txt")):
        try:
            found += audit(file)
        except Unaudited as error:
            unaudited.append(str(error))
    ours = affecting(found, assessed())
    for line in (*ours, *unaudited):
        sys.stderr.write(f"{line}\n")
    return 1 if ours else 2 if unaudited else 0


if __name__ == "__main__":
    sys.exit(main())
