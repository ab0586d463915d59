"""The wheel with the extra ``cli``, installed where nothing else is: what works without PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What ``pipx install '.[cli]'`` does, by uv, whose cache spares downloads."""
    folder = tmp_path_factory.mktemp("wheel")
    quiet = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}

    def call(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=300,
            env=quiet | {"XDG_STATE_HOME": str(folder / "state")},
        )  # fmt: skip

    for command in (
        (UV, "build", "--quiet", "--wheel", f"--out-dir={folder}", ROOT),
        (UV, "venv", "--quiet", f"--python={sys.executable}", folder / "venv"),
    ):
        done = call(*command)
        if done.returncode and "error sending request" in done.stderr:
            pytest.skip("needs a package index, to build and install the wheel")
        assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    done = call(UV, "pip", "install", "--quiet", f"--python={python}", f"{wheel}[cli]")
    assert done.returncode == 0, done.stderr

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return call(python.with_name("plimsoll"), *arguments)

    return run


@pytest.mark.long
def test_the_command_line_needs_no_torch(installed: Run) -> None:
    assert installed("--version").stdout.startswith("plimsoll ")
    for command in ("demo", "run"):
        file = () if command == "demo" else ("--local", "-f", str(ROOT / "examples/tiny.yaml"))
        done = installed(command, *file)
        assert done.returncode == 2
        assert "not installed: torch" in done.stderr
        assert "plimsoll watch URL" in done.stderr


@pytest.mark.long
def test_a_process_is_watched_from_the_wheel_alone(installed: Run) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        done = installed("watch", str(sleeper.pid), "--warmup=1s", "--duration=8s")
    finally:
        sleeper.kill()
        sleeper.wait(10)
    assert done.returncode == 0, done.stderr
    assert "memory by segment: anonymous_other " in done.stdout


@pytest.mark.long
def test_the_demo_has_its_manifest_in_the_wheel(installed: Run) -> None:
    done = installed("validate", str(ROOT / "examples" / "leaky.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
