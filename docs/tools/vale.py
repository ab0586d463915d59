"""Vale, the checker of prose: an installed one of the pinned version, or one Go build in a cache.

Its version and those of its dependencies are pinned by ``docs/vale/go.mod`` and ``go.sum``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

MODULE = Path(__file__).resolve().parents[1] / "vale"
PACKAGE = "github.com/vale-cli/vale/v3"
BUILD_TIMEOUT_S = 900


class NoValeError(Exception):
    """The machine has no Vale and cannot build it. The message says what to install."""


def find() -> str:
    """Return the path of Vale. Build it if it is absent, once, in about 90 seconds.

    Raises :class:`NoValeError` if it cannot be built.
    """
    version = pinned()
    installed = shutil.which("vale")
    if installed and _version(installed) == version:
        return installed
    digest = hashlib.sha256((MODULE / "go.mod").read_bytes() + (MODULE / "go.sum").read_bytes())
    target = _cache() / f"vale-{version}-{digest.hexdigest()[:12]}" / "vale"
    if not target.exists():
        _build(target, version)
    return str(target)


def pinned() -> str:
    """Return the version that ``go.mod`` requires, without its ``v``."""
    found = re.search(rf"{re.escape(PACKAGE)} v(\S+)", (MODULE / "go.mod").read_text())
    if found is None:
        raise NoValeError(f"{MODULE / 'go.mod'} does not require {PACKAGE}")
    return found[1]


def _version(program: str) -> str | None:
    done = subprocess.run(
        [program, "--version"], check=False, capture_output=True, text=True, timeout=30
    )
    return done.stdout.split()[-1].removeprefix("v") if done.stdout.split() else None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "plimsoll-tools"


def _build(target: Path, version: str) -> None:
    go = shutil.which("go")
    if go is None:
        raise NoValeError(
            f"no Vale {version}: install Go 1.25 or later (https://go.dev/dl/), which builds Vale "
            f"once, or put Vale {version} on the PATH (https://vale.sh/docs/install)"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (_cache() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another checkout may be building the same version
        if target.exists():
            return
        print(f"building Vale {version}, once", flush=True)
        stage = target.with_suffix(f".{os.getpid()}")
        try:
            done = subprocess.run(
                [go, "build", "-mod=readonly", "-o", str(stage), f"{PACKAGE}/cmd/vale"],
                cwd=MODULE, check=False, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NoValeError(f"go build of Vale took more than {BUILD_TIMEOUT_S} s") from error
        if done.returncode:
            raise NoValeError(f"go build of Vale {version} failed:\n{done.stderr[-2000:]}")
        stage.rename(target)
