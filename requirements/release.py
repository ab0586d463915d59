"""Write all files of a release that need no registry: ``make release VERSION=1.2.3``.

``dist/`` gets the Python package, the chart, the plain manifests, a bill of materials of each lock,
the release notes and the checksums of all. The version is that of ``pyproject.toml``, from which
``python charts/generate.py`` writes it into the chart and the manifests.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
UV = Path(sys.executable).with_name("uv")
SBOM = (UV, "tool", "run", "--from", "cyclonedx-bom==7.5.0", "cyclonedx-py", "requirements")
LOCKS = {"operator": "operator.txt", "supervisor": "sidecar.txt", "engine": "engine.txt"}
"""Part -> the lock of its image."""
TIMEOUT_S = 600


class Unreleasable(Exception):
    """Something is missing or wrong; the message says what to do."""


def run(*command: str | Path) -> str:
    """Return what a program prints; :class:`Unreleasable` if it fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except FileNotFoundError:
        raise Unreleasable(f"{command[0]}: not found: install it") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise Unreleasable(f"{' '.join(map(str, command))}: {said}")
    return done.stdout


def check_version(version: str) -> None:
    """Raise :class:`Unreleasable` unless this checkout has that version."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if version != own:
        raise Unreleasable(
            f"VERSION={version}: pyproject.toml has version {own}: set it there, then run make"
            " generate"
        )
    run(sys.executable, "charts/generate.py", "--check")


def notes(changelog: str, version: str) -> str:
    """Return the changelog's section of a version."""
    found = re.search(
        rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)", changelog, re.M | re.S
    )
    if found is None or not found[1].strip():
        raise Unreleasable(
            f"CHANGELOG.md has no section [{version}]: rename [Unreleased] and begin a new one"
        )
    return found[1].strip() + "\n"


def write(version: str) -> list[Path]:
    """Write ``dist/`` anew and return its files. Raises :class:`Unreleasable`."""
    check_version(version)
    told = notes((ROOT / "CHANGELOG.md").read_text(), version)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    (DIST / "NOTES.md").write_text(told)
    run(UV, "build", "--quiet", "--out-dir", DIST)
    (DIST / ".gitignore").unlink(missing_ok=True)
    run("helm", "package", "charts/plimsoll", "--destination", DIST)
    (DIST / "plimsoll.yaml").write_text(run("kubectl", "kustomize", "config"))
    definitions = sorted((ROOT / "crds").glob("*.plimsoll.dev.yaml"))
    (DIST / "plimsoll-crds.yaml").write_text("---\n".join(one.read_text() for one in definitions))
    for part, lock in LOCKS.items():
        out = DIST / f"plimsoll-{part}.cdx.json"
        run(*SBOM, f"requirements/{lock}", "--output-reproducible", "--output-file", out)
    files = sorted(DIST.iterdir())
    sums = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    return [*files, DIST / "SHA256SUMS"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="requirements/release.py", description=__doc__)
    parser.add_argument("version", help="as in pyproject.toml, for example 1.2.3")
    try:
        for file in write(parser.parse_args(arguments).version):
            print(f"{file.stat().st_size:>10} {file.relative_to(ROOT)}")
    except Unreleasable as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
