"""Write all files of a release that need no registry: ``make release VERSION=1.2.3``.

``dist/`` gets the Python package, the chart, the plain manifests, the kubectl plugin with its
manifest for krew, a bill of materials of each image, what is known of vulnerabilities (OpenVEX),
the release notes and the checksums of all; and, if asked for, archives of images for clusters
without a registry. The version is that of ``pyproject.toml``, from which
``python charts/generate.py`` writes it into the chart and the manifests.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import audit
import yaml

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
UV = Path(sys.executable).with_name("uv")
SBOM = (UV, "tool", "run", "--from", "cyclonedx-bom==7.5.0", "cyclonedx-py", "requirements")
LOCKS = {"operator": "operator.txt", "supervisor": "sidecar.txt", "engine": "engine.txt"}
"""Part -> the lock of its image."""
TIMEOUT_S = 600
PLUGIN = "kubectl-plimsoll"
LAUNCHER = """\
#!/bin/sh
# The command line as a kubectl plugin, in an environment of its own: it is a Python program.
package='plimsoll[cli]=={version}'
if command -v uvx > /dev/null; then exec uvx --quiet --from "$package" plimsoll "$@"; fi
if command -v pipx > /dev/null; then exec pipx run --spec "$package" plimsoll "$@"; fi
echo 'kubectl plimsoll: install uv or pipx, and Python 3.11 or later' >&2
exit 1
"""
KREW = "krew.googlecontainertools.github.com/v1alpha2"


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
        raise Unreleasable(f"CHANGELOG.md has no section [{version}]: begin it")
    return found[1].strip() + "\n"


def plugin(version: str, downloads: str, when: datetime) -> None:
    """Write the archive of the kubectl plugin and its manifest for krew."""
    archive = DIST / f"{PLUGIN}.tar.gz"
    members = {
        PLUGIN: (LAUNCHER.format(version=version).encode(), 0o755),
        "LICENSE": ((ROOT / "LICENSE").read_bytes(), 0o644),
    }
    with tarfile.open(archive, "w:gz") as packed:
        for name, (content, mode) in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(content), mode, int(when.timestamp())
            packed.addfile(member, io.BytesIO(content))
    platform = {
        "selector": {
            "matchExpressions": [{"key": "os", "operator": "In", "values": ["darwin", "linux"]}]
        },
        "uri": f"{downloads}/{archive.name}",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "bin": PLUGIN,
    }
    spec = {
        "version": f"v{version}",
        "homepage": "https://plimsoll.dev/",
        "shortDescription": "Find and cure memory leaks of inference engines",
        "description": "Shows the leak budgets of vLLM, SGLang and other engines in a cluster,\n"
        "explains incidents, and drains, trims or restarts a replica by hand.\n",
        "caveats": "Needs uv or pipx, and Python 3.11 or later.\n",
        "platforms": [platform],
    }
    manifest = {"apiVersion": KREW, "kind": "Plugin", "metadata": {"name": "plimsoll"}}
    text = yaml.safe_dump(manifest | {"spec": spec}, sort_keys=False)
    (DIST / "plimsoll.krew.yaml").write_text(text)


def save(builder: str, image: str, to: Path) -> None:
    """Save an image of the builder's store as an OCI archive."""
    if Path(builder).name == "docker":
        run(builder, "save", "--output", to, image)
    else:
        run(builder, "push", image, f"oci-archive:{to}:{image}")


def installed(archive: Path) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return what an OCI archive has: Debian packages with their architecture, and Python's."""
    debian: list[tuple[str, str, str]] = []
    python: set[tuple[str, str]] = set()
    with tarfile.open(archive) as image:
        for layer in _layers(image):
            for member in layer:
                if member.name.removeprefix("./") == "var/lib/dpkg/status":
                    status = layer.extractfile(member)
                    debian = list(_debian(status.read().decode() if status else ""))
                elif found := re.search(r"/([\w.]+)-([^/-]+)\.dist-info/METADATA$", member.name):
                    python.add((found[1], found[2]))
    return debian, sorted(python)


def _layers(image: tarfile.TarFile) -> Iterator[tarfile.TarFile]:
    def read(name: str) -> bytes:
        found = image.extractfile(name)
        return found.read() if found else b""

    def blob(descriptor: dict[str, Any]) -> bytes:
        return read("blobs/" + descriptor["digest"].replace(":", "/"))

    manifest = json.loads(read("index.json"))
    while "manifests" in manifest:
        manifest = json.loads(blob(manifest["manifests"][0]))
    for descriptor in manifest["layers"]:
        with tarfile.open(fileobj=io.BytesIO(blob(descriptor))) as layer:
            yield layer


def _debian(status: str) -> Iterator[tuple[str, str, str]]:
    for entry in status.split("\n\n"):
        fields = dict(re.findall(r"(?m)^([\w-]+): (.*)$", entry))
        if fields.get("Status", "").endswith(" installed"):
            yield fields["Package"], fields["Version"], fields["Architecture"]


def materials(part: str, version: str, archive: Path | None) -> None:
    """Write the bill of materials of a part: its lock, our package, and what its image has.

    Raises :class:`Unreleasable` for a Python package in the image that is in no lock.
    """
    out = DIST / f"plimsoll-{part}.cdx.json"
    run(*SBOM, f"requirements/{LOCKS[part]}", "--output-reproducible", "--output-file", out)
    bill = json.loads(out.read_text())
    name = f"plimsoll-{part}"
    bill["metadata"]["component"] = {"type": "container", "name": name, "version": version}
    bill["components"].append(_component(f"pkg:pypi/plimsoll@{version}", "plimsoll", version))
    if archive is not None:
        debian, python = installed(archive)
        known = {(_normal(one["name"]), one["version"]) for one in bill["components"]}
        unknown = [f"{a} {b}" for a, b in python if (_normal(a), b) not in known]
        if unknown:
            raise Unreleasable(f"{archive.name} has packages of no lock: {', '.join(unknown)}")
        bill["components"] += [
            _component(f"pkg:deb/debian/{one}@{is_}?arch={arch}", one, is_)
            for one, is_, arch in debian
        ]
    out.write_text(json.dumps(bill, indent=1) + "\n")


def _component(purl: str, name: str, version: str) -> dict[str, str]:
    return {"type": "library", "bom-ref": purl, "purl": purl, "name": name, "version": version}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def vulnerabilities(version: str, when: datetime) -> None:
    """Write what is known of vulnerabilities, as OpenVEX; say why if there is nothing to write."""
    try:
        found = {
            f"plimsoll-{part}": audit.audit(ROOT / "requirements" / lock)
            for part, lock in LOCKS.items()
        }
    except audit.Unaudited as error:
        sys.stderr.write(f"release: no OpenVEX document: {error}\n")
        return
    document = audit.openvex(found, audit.assessed(), version, when.isoformat())
    if document is None:
        sys.stderr.write("release: no OpenVEX document: no vulnerability is known\n")
        return
    (DIST / "plimsoll.openvex.json").write_text(json.dumps(document, indent=1) + "\n")


def write(version: str, downloads: str, builder: str, images: Sequence[str]) -> list[Path]:
    """Recreate ``dist/`` and return its files. Raises :class:`Unreleasable`.

    ``images`` are names in the builder's store, each for an archive.
    """
    check_version(version)
    told = notes((ROOT / "CHANGELOG.md").read_text(), version)
    when = datetime.fromtimestamp(int(run("git", "log", "-1", "--format=%ct")), UTC)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    (DIST / "NOTES.md").write_text(told)
    run(UV, "build", "--quiet", "--out-dir", DIST)
    (DIST / ".gitignore").unlink(missing_ok=True)
    run("helm", "package", "charts/plimsoll", "--destination", DIST)
    (DIST / "plimsoll.yaml").write_text(run("kubectl", "kustomize", "config"))
    definitions = sorted((ROOT / "crds").glob("*.plimsoll.dev.yaml"))
    (DIST / "plimsoll-crds.yaml").write_text("---\n".join(one.read_text() for one in definitions))
    plugin(version, downloads, when)
    archives = {}
    for image in images:
        part = image.rpartition("/")[2].partition(":")[0].removeprefix("plimsoll-")
        archives[part] = DIST / f"plimsoll-{part}-{version}.oci.tar"
        save(builder, image, archives[part])
    for part in LOCKS:
        materials(part, version, archives.get(part))
    vulnerabilities(version, when)
    files = sorted(DIST.iterdir())
    sums = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    return [*files, DIST / "SHA256SUMS"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="requirements/release.py", description=__doc__)
    parser.add_argument("version", help="as in pyproject.toml, for example 1.2.3")
    parser.add_argument("images", nargs="*", help="images to save as archives, by their names")
    parser.add_argument("--builder", default="", help="the program that has these images")
    parser.add_argument("--downloads", help="where the files will be, for krew")
    given = parser.parse_args(arguments)
    downloads = given.downloads or f"https://plimsoll.dev/releases/v{given.version}"
    try:
        for file in write(given.version, downloads, given.builder, given.images):
            print(f"{file.stat().st_size:>10} {file.relative_to(ROOT)}")
    except Unreleasable as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
