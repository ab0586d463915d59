"""An engine whose disks are full or read-only: real tmpfs, in a mount namespace of the engine's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine.conftest import Engine
from tests.integration.volume import Volume, volume

TROUBLES = ("full", "read-only")


def hinder(at: Volume, trouble: str) -> None:
    if trouble == "full":
        at.fill()
    else:
        at.mount("remount,ro")


class Inside(Engine):
    """An engine in a volume's namespace; tests read its run directory from outside."""

    def __init__(self, model: Path, at: Volume, log: Path, *flags: str) -> None:
        self.run_dir, self.log = at.seen, log
        (at.seen / "admin-token").write_text("token-of-a-test")
        command = [
            sys.executable, "-m", "plimsoll_engine", "serve", "--model", str(model),
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "0",
            "--admin-port", "0", "--run-dir", str(at.path), "--device", "cpu",
            "--dtype", "float32", *flags,
        ]  # fmt: skip
        with log.open("wb") as out:
            self.process = subprocess.Popen(at.inside(*command), stderr=out, stdout=out)


@contextmanager
def engine_in(model: Path, at: Volume, log: Path, *flags: str) -> Iterator[Inside]:
    engine = Inside(model, at, log, *flags)
    try:
        yield engine.wait_ready()
    finally:
        engine.end()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: a socket's path holds 107 bytes, also as the test sees it through /proc."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="run") as folder:
        yield Path(folder)


@pytest.mark.parametrize("trouble", ["full", pytest.param("read-only", marks=pytest.mark.long)])
def test_a_run_directory_that_takes_nothing_ends_no_stream_and_no_restart(
    tiny: Path, run_dir: Path, tmp_path: Path, trouble: str
) -> None:
    with (
        volume(run_dir) as run,
        engine_in(tiny, run, tmp_path / "log") as engine,
        engine.streams(2, 300) as streams,
    ):
        if trouble == "full":
            run.fill()
        else:  # a volume with files open for writing is not remounted
            over = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(run_dir / "stacks")]
            subprocess.run(run.inside(*over), check=True, timeout=30)
        before = engine.status()["epoch"]
        os.kill(engine.worker_pid(), 9)

        def another_serves() -> bool:
            status = engine.status()  # the engine calls the dead worker serving for a moment
            return bool(status["state"] == "serving" and status["epoch"] != before)

        engine.until(another_serves, "worker", 120)
        engine.begin("restart", "planned", scope="worker")
        assert engine.finish("planned", 120)["state"] == "succeeded"
        assert [one.result(120).usage.completion_tokens for one in streams] == [300, 300]
        code, stacks = engine.admin("GET", "/diagnostics/stacks")
        assert code == 200
        assert "Current thread" in stacks, "the frontend's own need no disk"
        assert "Traceback" not in engine.log.read_text()
        if trouble == "read-only":
            assert "Read-only file system" in engine.log.read_text()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(60) == 0


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_run_directory_that_takes_nothing_at_the_start_is_one_line(
    tiny: Path, run_dir: Path, tmp_path: Path, trouble: str
) -> None:
    with volume(run_dir) as run:
        (run.seen / "admin-token").write_text("token")
        hinder(run, trouble)
        done = serve(run, tiny, run_dir)
    assert done.returncode == 2, done.stderr
    (line,) = [one for one in done.stderr.splitlines() if not one.startswith("{")]
    assert f"--run-dir {run_dir}" in line
    assert (
        "writable" if trouble == "read-only" else "use a writable directory with free space"
    ) in line
    assert not (run_dir / "engine.json").exists()


def test_a_model_and_caches_on_read_only_volumes_serve(
    tiny: Path, run_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with volume(model, 64 << 10) as at:
        shutil.copytree(tiny, at.seen, dirs_exist_ok=True)
        (at.seen / "run").mkdir()
        at.mount("remount,ro")
        # A second volume in the same namespace, for the run directory alone.
        subprocess.run(
            at.inside("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run_dir)),
            check=True, timeout=30,
        )  # fmt: skip
        inside = Volume.__new__(Volume)
        inside.path, inside._holder = run_dir, at._holder
        inside.seen = Path(f"/proc/{at._holder.pid}/root") / run_dir.relative_to("/")
        with engine_in(model, inside, tmp_path / "log") as engine:
            assert engine.stream(1, 20, False).usage.completion_tokens == 20


def serve(at: Volume, model: Path, run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "plimsoll_engine", "serve", "--model", str(model)]
    command += ["--run-dir", str(run_dir), "--port", "0", "--admin-port", "0", "--device", "cpu"]
    return subprocess.run(at.inside(*command), capture_output=True, text=True, timeout=180)


def test_half_a_checkpoint_is_refused_by_its_file(
    tiny: Path, run_dir: Path, tmp_path: Path
) -> None:
    """As a copy onto a disk that filled up leaves it."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (weights,) = model.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    with volume(run_dir) as run:
        (run.seen / "admin-token").write_text("token")
        done = serve(run, model, run_dir)
    assert done.returncode != 0
    assert str(weights) in done.stderr


COMPILE = """
import os, sys
from plimsoll_engine.kernels.preload import CACHE_MANAGER
os.environ["TRITON_CACHE_MANAGER"] = CACHE_MANAGER
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from plimsoll_engine.kernels.rows import _take_token_ids
signature = {"ids": "*i32", "sources": "*i32", "newest": "*i64", "out": "*i64", "count": "i32",
             "BLOCK": "constexpr", "OVERLAP": "constexpr"}
source = ASTSource(_take_token_ids, signature, {"BLOCK": 256, "OVERLAP": False})
made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(len(made.asm["cubin"]))
"""


def compile_kernel(at: Volume, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A kernel of the engine's, by Triton's real compiler, which needs no device."""
    done = subprocess.run(
        at.inside(sys.executable, "-c", COMPILE),
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(
    "trouble", [pytest.param("read-only", marks=pytest.mark.long), "full in the middle"]
)
def test_a_triton_cache_that_takes_nothing_is_named_and_done_without(
    tmp_path: Path, trouble: str
) -> None:
    pytest.importorskip("triton", reason="published for Linux on x86-64 only")
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    cache.mkdir()
    temporary.mkdir()
    environ = {"TRITON_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
    with volume(cache) as at:
        if trouble == "full in the middle":  # the first files fit
            with at.fill().open("ab") as ballast:
                ballast.truncate(ballast.tell() - (16 << 10))
        else:
            hinder(at, trouble)
        first = compile_kernel(at, environ)
        (line,) = [one for one in first.stderr.splitlines() if "TRITON_CACHE_DIR" in one]
        assert str(cache) in line
        assert "free space, or set TRITON_CACHE_DIR to a writable directory" in line
        kept = sorted(temporary.rglob("*.cubin"))
        assert len(kept) == 1
        before = kept[0].stat().st_mtime_ns
        assert not list(at.seen.rglob("tmp.pid_*")), "no half of a file is left"
        assert compile_kernel(at, environ).stdout == first.stdout
        assert kept[0].stat().st_mtime_ns == before, "the next worker finds it"
        if trouble != "read-only":
            (at.seen / "ballast").unlink()
            shutil.rmtree(temporary)
            temporary.mkdir()
            again = compile_kernel(at, environ)
            assert (again.stdout, again.stderr) == (first.stdout, "")
            assert list(at.seen.rglob("*.cubin"))


def test_a_whole_triton_cache_on_a_read_only_volume_is_used(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="published for Linux on x86-64 only")
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    cache.mkdir()
    temporary.mkdir()
    environ: dict[str, Any] = {"TRITON_CACHE_DIR": str(cache), "TMPDIR": str(temporary)}
    with volume(cache) as at:
        first = compile_kernel(at, environ)
        at.mount("remount,ro")
        again = compile_kernel(at, environ)
    assert (again.stdout, again.stderr) == (first.stdout, "")
    assert not list(temporary.iterdir())
