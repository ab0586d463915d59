"""The images of the node tests.

Operator and supervisor are the images that users get, built from the Dockerfile. The engine's has
this Python, this checkout's code and no packages, because PyTorch alone has 5 GB: the node shows
this environment read-only to every container, at :data:`ENVIRONMENT`. A test of its own builds and
runs the engine image that users get.
"""

from __future__ import annotations

import compileall
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab import archive
from tests.lab.binaries import Binaries
from tests.lab.errors import LabError

ROOT = Path(__file__).resolve().parents[2]
PAUSE = "localhost/pause:1"
ENGINE = "localhost/plimsoll-engine:test"
SUPERVISOR = "localhost/plimsoll-supervisor:test"
OPERATOR = "localhost/plimsoll-operator:test"
PEER = "localhost/peer:test"
"""Python for a real engine of another project."""
CODE = "/opt/plimsoll/code"
ENVIRONMENT = "/opt/plimsoll/environment"
"""Where the node shows :func:`site_packages` to every container."""
EXAMPLE_MODEL = "/opt/plimsoll/models/tiny"
"""Where the services of ``examples/`` look for their checkpoint."""

TOOLS = [
    "sh",
    "sleep",
    "ls",
    "cat",
    "grep",
    "kill",
    "ps",
    "id",
    "head",
    "tail",
    "env",
    "stat",
    "df",
]
PEER_TOOLS = ["lscpu"]
"""Those that vLLM's CPU backend runs."""
# torch loads libpthread.so.0 by name, libsndfile needs libmvec, and no ELF file of the image refers
# to the name service modules.
BY_NAME = [
    "libpthread.so.0",
    "libdl.so.2",
    "libmvec.so.1",
    "librt.so.1",
    "libutil.so.1",
    "libresolv.so.2",
    "libnss_files.so.2",
    "libnss_dns.so.2",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "libgomp.so.1",
]
MULTIARCH = f"{platform.machine()}-linux-gnu"
LIBRARY_FOLDERS = (Path("/lib") / MULTIARCH, Path("/lib64"))
LOADERS = (Path("/lib64/ld-linux-x86-64.so.2"), Path("/lib/ld-linux-aarch64.so.1"))


def pause_image(folder: Path, binaries: Binaries) -> Path:
    """The image of the sandbox container that every pod has."""
    assert binaries.pause is not None
    target = folder / "pause.tar"
    layer = archive.Layer(trees={binaries.pause: "/pause"})
    archive.write(target, PAUSE, layer, ["/pause"], {})
    return target


def engine_image(folder: Path, checkpoint: Path | None = None) -> Path:
    """Python and our code, and a checkpoint for the examples where one is given."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    layer = _python(Path(sys.base_prefix), version)
    _code(layer, "plimsoll_api", "plimsoll_engine", "plimsoll_faults")
    if checkpoint is not None:
        layer.trees[checkpoint] = EXAMPLE_MODEL
    env = _env(f"{CODE}:{ENVIRONMENT}")
    target = folder / "engine.tar"
    archive.write(target, ENGINE, layer, ["python", "-m", "plimsoll_engine"], env)
    return target


def released_image(folder: Path, code: Path, name: str, entrypoint: Sequence[str]) -> Path:
    """Python and the packages in the folder ``code``, which are those of an earlier release."""
    layer = _python(Path(sys.base_prefix), f"{sys.version_info.major}.{sys.version_info.minor}")
    compileall.compile_dir(code, quiet=2)
    layer.trees |= {path: f"{CODE}/{path.name}" for path in code.glob("plimsoll*")}
    target = folder / "released.tar"
    archive.write(target, name, layer, entrypoint, _env(f"{CODE}:{ENVIRONMENT}"))
    return target


def peer_image(folder: Path, environment: Path) -> Path:
    """What an engine's virtual environment needs from a machine; the node shows it the rest."""
    python = (environment / "bin" / "python").resolve()
    layer = _python(python.parent.parent, python.name.removeprefix("python"), *PEER_TOOLS)
    needed = archive.libraries(environment.glob("lib/python*/site-packages/**/*.so*"))
    layer.files += [path for path in needed if path.parent in LIBRARY_FOLDERS]
    target = folder / "peer.tar"
    env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
    archive.write(target, PEER, layer, [], env)
    return target


def checkpoint(folder: Path) -> Path:
    """The tiny checkpoint, made in ``folder``."""
    target = folder / "tiny"
    command = [sys.executable, "-m", "plimsoll_faults.models.tiny", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()[-1000:]}")
    return target


def site_packages() -> Path:
    """The environment that the tests run in."""
    return Path(next(p for p in sys.path if p.endswith("site-packages") and sys.prefix in p))


def _python(prefix: Path, version: str, *tools: str) -> archive.Layer:
    files = [Path(shutil.which(tool) or "/bin/sh") for tool in (*TOOLS, *tools)]
    trees = {
        prefix / "bin" / f"python{version}": f"{prefix}/bin/python{version}",
        prefix / "lib" / f"python{version}": f"{prefix}/lib/python{version}",
    }
    shared = list((prefix / "lib").glob(f"libpython{version}*.so*"))
    trees |= {path: str(path) for path in shared}
    modules = (prefix / "lib" / f"python{version}" / "lib-dynload").glob("*.so")
    python = prefix / "bin" / f"python{version}"
    needed = archive.libraries([*files, python, *modules])
    by_name = [f / n for f in LIBRARY_FOLDERS for n in BY_NAME if (f / n).exists()]
    loader = [path for path in LOADERS if path.exists()]
    inside = [path for path in needed if prefix not in path.parents]
    return archive.Layer(
        trees=trees,
        files=[*files, *inside, *by_name, *loader, Path("/bin/sh")],
        links={f"{prefix}/bin/python".strip("/"): f"python{version}"},
        # torch calls getpass.getuser(), which fails for a UID without a name.
        texts={
            "etc/passwd": "root:x:0:0::/root:/bin/sh\napp:x:10001:10001::/tmp:/bin/sh\n",
            "etc/group": "root:x:0:\napp:x:10001:\n",
            "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        },
        skip=archive.SKIPPED | {"site-packages", f"config-{version}-{MULTIARCH}"},
    )


def _code(layer: archive.Layer, *packages: str) -> None:
    folders = {
        "plimsoll_api": "crds",
        "plimsoll_engine": "engine_image",
        "plimsoll_faults": "faults",
    }
    for package in packages:
        source = ROOT / folders[package] / package
        # As pip does: without it every start of Python would compile what it imports.
        compileall.compile_dir(source, quiet=2)
        layer.trees[source] = f"{CODE}/{package}"
    # The version, and the entry points by which the engine finds the faults.
    for metadata in site_packages().glob("plimsoll*.dist-info"):
        layer.trees[metadata] = f"{CODE}/{metadata.name}"


def _env(python_path: str) -> dict[str, str]:
    prefix = Path(sys.base_prefix)
    return {
        "PATH": f"{CODE}/bin:{prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": python_path,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
