"""The images that users get: the targets of the Dockerfile, built without a daemon or a registry.

buildah builds them on a Debian that debootstrap makes. Base image, layers and the archives of the
finished images stay in the lab's cache; an image is built again when one of its sources changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.binaries import cache_dir
from tests.lab.errors import MissingError

ROOT = Path(__file__).resolve().parents[2]
DEBIAN = "trixie"
PACKAGES = ("buildah", "debootstrap")
TIMEOUT_S = 1800
SOURCES = (
    "Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE", "requirements",
    "crds", "operator", "sidecar", "engine_image", "cli", "probe", "faults",
)  # fmt: skip
"""What the Dockerfile copies, and itself."""
CERTIFICATES = "/run/certificates.pem"
PIP_OPTIONS = ("index-url", "trusted-host", "timeout", "default-timeout")


def missing() -> str | None:
    """What this machine lacks to build images, or None."""
    if os.geteuid() != 0:
        return "root is needed to build images"
    absent = [package for package in PACKAGES if shutil.which(package) is None]
    return f"install {' and '.join(absent)} to build images" if absent else None


def archive(target: str, name: str) -> Path:
    """The OCI archive of a Dockerfile's ``target``, whose image is called ``name``.

    Builds it if it is absent or out of date, which takes seconds where only our code changed and
    minutes the first time. Raises :class:`MissingError` where it cannot be built.
    """
    if (why := missing()) is not None:
        raise MissingError(why)
    folder = _folder()
    path = folder / f"{target}-{_digest(name)}.tar"
    with _locked(folder):
        if not path.exists():
            for old in folder.glob(f"{target}-*.tar"):
                old.unlink()
            _build(target, name)
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            _buildah("push", *_policy(), name, f"oci-archive:{partial}:{name}")
            _buildah("rmi", name)
            partial.rename(path)
    return path


@contextmanager
def mounted(target: str) -> Iterator[Path]:
    """The root file system of a fresh container of ``target``, built if it is out of date.

    For an image that is too large to be copied into an archive.
    """
    if (why := missing()) is not None:
        raise MissingError(why)
    name = f"localhost/plimsoll-{target}:mounted"
    with _locked(_folder()):
        _build(target, name)
        container = _buildah("from", "--pull-never", *_policy(), name)
    try:
        yield Path(_buildah("mount", container))
    finally:
        _buildah("rm", container)


def _folder() -> Path:
    folder = cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(name: str) -> str:
    digest = hashlib.sha256(name.encode())
    for source in SOURCES:
        top = ROOT / source
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _base() -> str:
    name = f"localhost/debian:{DEBIAN}-slim"
    if _buildah("images", "--quiet", "--filter", f"reference={name}"):
        return name
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        _run("debootstrap", "--variant=minbase", DEBIAN, f"{folder}/root")
        container = _buildah("from", "scratch")
        _buildah("add", "--quiet", container, f"{folder}/root", "/")
        _buildah("commit", "--quiet", "--rm", *_policy(), container, name)
    return name


def _build(target: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _buildah("build", *_build_flags(Path(folder)), f"--target={target}", f"--tag={name}",
                 str(ROOT))  # fmt: skip


def _build_flags(folder: Path) -> list[str]:
    """What a build on this machine needs; ``folder`` gets files for it."""
    base = _base()
    # This machine's way to its package index is the build's alone: nothing of it is kept.
    pip = folder / "pip.conf"
    pip.write_text(_pip_conf())
    certificates = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    return [
        "--isolation=chroot", "--pull-never", "--layers", *_policy(), f"--build-arg=BASE={base}",
        f"--volume={certificates}:{CERTIFICATES}:ro", f"--volume={pip}:/etc/pip.conf:ro",
    ]  # fmt: skip


def builder(folder: Path) -> Path:
    """A program in ``folder`` that is buildah with the store and the settings of this lab.

    For ``make images``. Raises :class:`MissingError` where images cannot be built.
    """
    if (why := missing()) is not None:
        raise MissingError(why)
    build, program = shlex.join(_build_flags(folder)), folder / "lab-buildah"
    program.write_text(
        f"""#!/bin/sh
verb=$1; shift
case $verb in
build) set -- {build} "$@" ;;
push) set -- {shlex.join(_policy())} "$@" ;;
esac
exec flock {_folder()}/lock buildah {shlex.join(_storage())} "$verb" "$@"
"""
    )
    program.chmod(0o755)
    return program


def _pip_conf() -> str:
    lines = ["[global]", f"cert = {CERTIFICATES}"]
    for option in PIP_OPTIONS:
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}")
        if value is not None:
            lines.append(f"{option} = {value}")
    return "\n".join(lines) + "\n"


def _policy() -> tuple[str]:
    """Local images bear no signatures."""
    path = _folder() / "policy.json"
    path.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    return (f"--signature-policy={path}",)


def _buildah(verb: str, *arguments: str) -> str:
    return _run("buildah", *_storage(), verb, *arguments)


def _storage() -> tuple[str, ...]:
    folder = _folder()
    return f"--root={folder}/storage", f"--runroot={folder}/run", "--storage-driver=overlay"


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise MissingError(f"{command[0]} took more than {TIMEOUT_S} s") from error
    if done.returncode:
        raise MissingError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()
