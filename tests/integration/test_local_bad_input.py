"""What a person can get wrong in local mode: one clear message, the right status, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plimsoll_cli.local.runner import choose_free_ports

PLIMSOLL = (sys.executable, "-m", "plimsoll_cli.main")
GOOD = """\
apiVersion: plimsoll.dev/v1alpha1
kind: InferenceService
metadata:
  name: bad
spec:
  model:
    uri: file://{model}
  engine:
    port: {port}
    args: [--device=cpu, --dtype=float32{more}]
    startupTimeout: 60s
  memory:
    host:
      growthBudget: 48Mi
    warmup: 4s
"""


def plimsoll(*arguments: object, limit_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*PLIMSOLL, *map(str, arguments)], capture_output=True, text=True, timeout=limit_s
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


def run_local(manifest: Path, run_dir: Path) -> subprocess.CompletedProcess[str]:
    return plimsoll("run", "--local", "-f", manifest, "--run-dir", run_dir, "--no-view")


def write(folder: Path, model: Path, more: str = "") -> Path:
    file = folder / "service.yaml"
    file.write_text(GOOD.format(model=model, more=more, port=choose_free_ports([None])[0]))
    return file


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("growthBudget: 48Mi", "growthBudget: 0", "spec.memory.host.growthBudget"),
        ("growthBudget: 48Mi", "growthBudget: 2Gi\n      limit: 1Gi", "spec.memory.host"),
        ("  memory:", "  memmory: {}\n  memory:", "spec.memmory"),
        ("metadata:", "metadata: [", "service.yaml:5"),
        ("file://", "pvc://claim", "spec.model.uri"),
        ("file://", "file:///nowhere", "spec.model.uri"),
    ],
)
def test_a_bad_manifest_is_refused_before_anything_starts(
    tmp_path: Path, tiny: Path, old: str, new: str, field: str
) -> None:
    file = write(tmp_path, tiny)
    file.write_text(file.read_text().replace(old, new, 1))

    done = run_local(file, tmp_path / "run")

    assert done.returncode == 2
    assert field in done.stderr
    assert not (tmp_path / "run" / "engine.log").exists()


def test_an_engine_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path, tiny: Path) -> None:
    file = write(tmp_path, tiny, ", --no-such-flag")

    done = run_local(file, tmp_path / "run")

    assert done.returncode == 1
    assert "the engine ended with status 2" in done.stderr
    assert "--no-such-flag" in done.stderr
    assert str(tmp_path / "run" / "engine.log") in done.stderr


def test_a_damaged_checkpoint_is_named(tmp_path: Path, tiny: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")

    done = run_local(write(tmp_path, broken), tmp_path / "run")

    assert done.returncode == 1
    assert "the engine ended with status 1" in done.stderr
    assert "model.safetensors" in done.stderr


def test_an_engine_that_never_becomes_ready_is_given_up(tmp_path: Path, tiny: Path) -> None:
    """The checkpoint's weights are a pipe that nobody writes to: loading hangs for ever."""
    stuck = tmp_path / "stuck"
    shutil.copytree(tiny, stuck)
    (stuck / "model.safetensors").unlink()
    os.mkfifo(stuck / "model.safetensors")
    file = write(tmp_path, stuck)
    file.write_text(file.read_text().replace("startupTimeout: 60s", "startupTimeout: 8s"))
    impatient = "from plimsoll_cli import main; from plimsoll_cli.local import runner; "
    impatient += "runner.READY_MARGIN_S = 2.0; raise SystemExit(main.main())"

    command = [sys.executable, "-c", impatient, "run", "--local", "-f", str(file), "--no-view"]
    command += ["--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the engine was not ready within 10 s" in done.stderr
    assert "engine.log" in done.stderr


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "file").write_text("")

    done = run_local(write(tmp_path, tiny), tmp_path / "file" / "run")

    assert done.returncode == 2
    assert f"--run-dir {tmp_path}/file/run: Not a directory" in done.stderr


@pytest.mark.parametrize(
    "command", [("incidents", "--local", "absent"), ("record", "x.jsonl", "absent")]
)
def test_a_service_that_never_ran_here_is_said(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    done = plimsoll(*command)

    assert done.returncode == 2
    assert "absent" in done.stderr


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is not a trace header"), (b'{"trace": 1}\n', "is not a trace header")],
)
def test_replay_refuses_what_is_no_trace(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(content)

    done = plimsoll("replay", file, "--mode", "Recover")

    assert done.returncode == 2
    assert done.stderr.startswith(f"plimsoll: {file}:1: ")
    assert expected in done.stderr
    assert done.stdout == ""


def test_no_colour_codes_where_nobody_wants_them() -> None:
    done = plimsoll("--help")

    assert done.returncode == 0
    assert "\x1b[" not in done.stdout


@pytest.fixture
def full_journal(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose journal volume has 8 MiB, all of them taken.

    Emptied, it has room for the journal: SQLite alone takes 64 KiB before the first row, and its
    write-ahead log grows to 4 MiB before a checkpoint starts it over.
    """
    if os.getuid() != 0:
        pytest.skip(
            "mounting a small volume needs root; test_supervisor_crash fills one by a limit"
        )
    state = tmp_path / "run" / "state"
    state.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(state)]
    subprocess.run(mount, check=True, timeout=10)
    try:
        with (state / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(b"x" * 4096)
            except OSError:
                pass
        yield state
    finally:
        subprocess.run(["umount", "-l", state], check=True, timeout=10)


def test_a_full_journal_volume_is_said_and_the_service_goes_on(
    tmp_path: Path, tiny: Path, full_journal: Path
) -> None:
    file, run_dir = write(tmp_path, tiny), tmp_path / "run"
    output = tmp_path / "out"
    with output.open("wb") as out:
        process = subprocess.Popen(
            [*PLIMSOLL, "run", "--local", "-f", file, "--run-dir", run_dir], stdout=out, stderr=out
        )
    try:
        url = _announced(output, process, "ready: the OpenAI API is at ")
        supervisor = _announced(output, process, "metrics are at ").removesuffix("/metrics")
        state = _state(supervisor, lambda body: body["journal_error"] is not None)
        assert "journal.sqlite" in state["journal_error"]
        assert "free space on its volume" in state["journal_error"]
        models = httpx.get(f"{url.removesuffix('/v1,')}/v1/models", timeout=10)
        assert models.status_code == httpx.codes.OK
        admin = json.loads((run_dir / "run" / "engine.json").read_text())["admin_port"]
        _check_wrong_tokens(f"http://127.0.0.1:{admin}/admin/v1/status")

        (full_journal / "ballast").write_bytes(b"")

        _state(supervisor, lambda body: body["journal_error"] is None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)


def _check_wrong_tokens(url: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}):
        answer = httpx.get(url, headers=headers, timeout=10)
        assert answer.status_code == httpx.codes.UNAUTHORIZED
        assert answer.json()["message"]


def _announced(output: Path, process: subprocess.Popen[bytes], before: str) -> str:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        _, found, rest = output.read_text().partition(before)
        if found and "\n" in rest:
            return rest.split()[0]
        assert process.poll() is None, output.read_text()
        time.sleep(0.1)
    pytest.fail(f"never said {before!r}: {output.read_text()}")


def _state(url: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline, body = time.monotonic() + 60, None
    while time.monotonic() < deadline:
        try:
            body = httpx.get(f"{url}/state", timeout=5).raise_for_status().json()
            if "journal_error" in body and wanted(body):
                return dict(body)
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    pytest.fail(f"never so: {body}")
