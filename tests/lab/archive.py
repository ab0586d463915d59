"""Writes an OCI image archive of one layer, with no daemon, registry or privilege."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SKIPPED = frozenset({"test", "tkinter", "idlelib", "ensurepip"})


@dataclass
class Layer:
    """What goes into an image. ``trees`` maps a host folder to its place in the image; ``files``
    are host files under their own path (links resolved), ``links`` are symbolic links by target;
    ``skip`` are names left out."""

    trees: dict[Path, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    skip: frozenset[str] = SKIPPED


def write(
    target: Path, name: str, layer: Layer, entrypoint: Sequence[str], env: dict[str, str]
) -> None:
    """Write the archive of image ``name`` (REPOSITORY:TAG) to ``target``."""
    blob = target.with_suffix(".layer")
    with blob.open("wb") as raw, tarfile.open(fileobj=raw, mode="w|") as tar:
        _fill(tar, layer)
    with blob.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {
            "Entrypoint": list(entrypoint),
            "Env": [f"{key}={value}" for key, value in env.items()],
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    config_bytes = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", config_bytes),
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": f"sha256:{digest}",
                "size": blob.stat().st_size,
            }
        ],
    }
    manifest_bytes = json.dumps(manifest).encode()
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest_bytes)
    entry["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rsplit(":", 1)[1],
    }
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(target, "w") as tar:
        _text(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _text(tar, "index.json", index)
        for data in (config_bytes, manifest_bytes):
            _text(tar, f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data)
        tar.add(blob, arcname=f"blobs/sha256/{digest}")
    blob.unlink()


def libraries(files: Iterable[Path]) -> list[Path]:
    """The shared libraries that the loader needs for ``files``, by ``ldd``."""
    paths = [str(path) for path in files]
    found: set[Path] = set()
    for start in range(0, len(paths), 200):
        out = subprocess.run(["ldd", *paths[start : start + 200]], capture_output=True, text=True)
        for line in out.stdout.splitlines():
            path = line.split("=>")[-1].strip().split(" (")[0]
            if path.startswith("/") and not path.endswith(":"):
                found.add(Path(path))
    return sorted(found)


def _fill(tar: tarfile.TarFile, layer: Layer) -> None:
    made: set[str] = set()

    def folder(path: str, mode: int = 0o755) -> None:
        if path and path not in made:
            folder(os.path.dirname(path))
            made.add(path)
            info = tarfile.TarInfo(path)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if os.path.basename(info.name) in layer.skip:
            return None
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    folder("tmp", 0o1777)
    for name in ("etc", "proc", "sys", "dev", "run", "var"):
        folder(name)
    for source, target in layer.trees.items():
        place = target.strip("/")
        folder(os.path.dirname(place))
        tar.add(source, arcname=place, filter=plain)
    for file in dict.fromkeys(layer.files):
        name = str(file).strip("/")
        folder(os.path.dirname(name))
        info = plain(tar.gettarinfo(os.path.realpath(file), name))
        assert info is not None
        with file.open("rb") as data:
            tar.addfile(info, data)
    for name, to in layer.links.items():
        folder(os.path.dirname(name))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, to
        tar.addfile(info)
    for name, text in layer.texts.items():
        folder(os.path.dirname(name))
        _text(tar, name, text.encode())


def _text(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}
