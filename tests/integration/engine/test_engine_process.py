"""The engine as a process: flags, token file, signals, deaths; no orphan is ever left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest


def serve(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plimsoll_engine", *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "serve|drain"),
        (("serve",), "--model"),
        (("serve", "--model", "{tiny}", "--run-dir", "{run}", "--port", "70000"), "70000"),
        (("serve", "--model", "{run}", "--run-dir", "{run}"), "has no config.json"),
        (("serve", "--model", "{tiny}", "--run-dir", "/proc/nowhere"), "--run-dir /proc/nowhere"),
        (("serve", "--model", "{tiny}", "--run-dir", "{run}/" + "x" * 100), "too long"),
        (("serve", "--model", "{tiny}", "--run-dir", "{run}", "--dtype", "int3"), "int3"),
        (("drain", "--run-dir", "{run}", "--deadline", "0"), "--deadline"),
    ],
)
def test_bad_flags_get_one_line_and_status_2(
    tiny: Path, tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    done = serve(*(flag.format(tiny=tiny, run=tmp_path) for flag in flags))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_faults_need_leave(tiny: Path, tmp_path: Path) -> None:
    flags = ("serve", "--model", str(tiny), "--run-dir", str(tmp_path))
    done = serve(*flags, PLIMSOLL_INJECT="eviction_loop")
    assert done.returncode == 2
    assert "--allow-inject" in done.stderr
    done = serve(*flags, "--allow-inject", PLIMSOLL_INJECT="gremlins")
    assert done.returncode == 2
    assert "gremlins" in done.stderr


def test_a_missing_token_file_is_named(tiny: Path, tmp_path: Path) -> None:
    """In a pod, where the supervisor writes it."""
    done = serve(
        "serve", "--model", str(tiny), "--run-dir", str(tmp_path), "--startup-timeout", "0.5",
        "--port", "0", "--admin-port", "0", KUBERNETES_SERVICE_HOST="10.0.0.1",
    )  # fmt: skip
    assert done.returncode == 2
    assert str(tmp_path / "admin-token") in done.stderr


def test_outside_a_pod_an_engine_writes_its_own_token_and_says_where(start_engine: Any) -> None:
    engine = start_engine(token=None).wait_ready()
    token = engine.run_dir / "admin-token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert f'"file": "{token}"' in engine.log_tail()
    assert engine.admin("GET", "/status", token=token.read_text())[0] == 200
    assert engine.admin("GET", "/status")[0] == 401


def test_a_full_run_directory_is_named(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "admin-token").write_text("token")
    (tmp_path / "engine.tmp").symlink_to("/dev/full")  # each write to it finds no space
    done = serve(
        "serve", "--model", str(tiny), "--run-dir", str(tmp_path), "--port", "0",
        "--admin-port", "0",
    )  # fmt: skip
    assert done.returncode == 2
    assert f"cannot write to --run-dir {tmp_path}: [Errno 28]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_that_cannot_start_ends_the_engine_with_its_reason(
    start_engine: Any,
) -> None:
    engine = start_engine("--max-model-len", "100000000")
    assert engine.process.wait(120) == 1
    assert "max_position_embeddings" in engine.log_tail()


def test_sigterm_lets_requests_finish_and_exits_0(start_engine: Any) -> None:
    engine = start_engine(warm=False).wait_ready()
    family = engine.family()
    assert len(family) == 5  # zygote, weight server, worker, its server for grammars, preparer
    with engine.streams(4, 150) as futures:
        engine.process.send_signal(signal.SIGTERM)
        assert [future.result(60).usage.completion_tokens for future in futures] == [150] * 4
    assert engine.process.wait(30) == 0
    assert_gone(family)
    assert '"message": "worker stopped"' in engine.log_tail()


@pytest.mark.parametrize("reached", ["engine state changed", "worker forked"])
def test_sigterm_ends_an_engine_that_is_still_loading(
    start_engine: Any, tiny: Path, tmp_path: Path, reached: str
) -> None:
    """The weights are a pipe that nobody writes to: the start would take its 600 seconds."""
    stuck = tmp_path / "stuck"
    shutil.copytree(tiny, stuck)
    (stuck / "model.safetensors").unlink()
    os.mkfifo(stuck / "model.safetensors")
    engine = start_engine(model=stuck, warm=reached == "worker forked")
    engine.until(lambda: f'"message": "{reached}"' in engine.log_tail(), reached, 180)
    if reached == "worker forked":
        warming = (503, '{"status":"warming","doing":"weights"}')
        engine.until(lambda: engine.get("/health") == warming, "the stage of the start", 180)
        assert engine.get("/ready")[0] == 503
        # The size of an answer has no bound before the worker tells the context.
        large = {"prompt": "a", "n": 16, "max_tokens": 8000, "logprobs": 20}
        status, body = engine.post("/v1/completions", json.dumps(large).encode())
        assert (status, body["error"]["code"]) == (503, "not_serving"), body
    family = engine.family()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(60) == 0
    assert_gone(family)
    assert "Traceback" not in engine.log_tail()


def test_kill_9_of_the_frontend_leaves_no_orphan_and_its_run_directory_serves_again(
    start_engine: Any,
) -> None:
    engine = start_engine(warm=False).wait_ready()
    family = engine.family()
    boot = engine.status()["epoch"].split(":")[0]
    engine.process.kill()
    engine.process.wait(10)
    assert_gone(family)
    (engine.run_dir / "engine.json").unlink()
    again = start_engine(run_dir=engine.run_dir).wait_ready()
    epoch = again.status()["epoch"]
    assert epoch.endswith(":1")
    assert not epoch.startswith(boot)
    assert again.stream(1, 5, False).usage.completion_tokens == 5

    again.clean()


def role_pid(engine: Any, role: str) -> int | None:
    found = [p["pid"] for p in engine.status()["processes"] if p["role"] == role]
    return int(found[0]) if found else None


def test_a_killed_zygote_is_replaced_while_its_worker_serves(start_engine: Any) -> None:
    engine = start_engine().wait_ready()
    zygote, server, worker = (
        role_pid(engine, role) for role in ("zygote", "weight_server", "worker")
    )
    assert zygote is not None
    with engine.streams(2, 200) as futures:
        os.kill(zygote, signal.SIGKILL)
        assert all(future.result(90).usage.completion_tokens == 200 for future in futures)
    assert (role_pid(engine, "weight_server"), role_pid(engine, "worker")) == (server, worker)
    assert engine.status()["worker_starts"] == 1
    engine.until(lambda: role_pid(engine, "zygote") not in (None, zygote), "another zygote", 180)

    # The next worker is the new zygote's, and has the weights of the same weight server.
    with engine.streams(2, 200) as futures:
        engine.begin("restart", "renewed")
        assert engine.finish("renewed", 90)["state"] == "succeeded"
        assert all(future.result(90).usage.completion_tokens == 200 for future in futures)
    assert role_pid(engine, "weight_server") == server
    assert role_pid(engine, "worker") != worker
    again = role_pid(engine, "worker")

    # Zygote and worker both: the streams wait for a worker of a third zygote.
    zygote = role_pid(engine, "zygote")
    assert zygote is not None
    assert again is not None
    with engine.streams(2, 200) as futures:
        os.kill(zygote, signal.SIGKILL)
        os.kill(again, signal.SIGKILL)
        assert all(future.result(240).usage.completion_tokens == 200 for future in futures)
    assert role_pid(engine, "weight_server") == server
    family = engine.family()
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in family)
    engine.process.kill()
    engine.process.wait(10)
    assert_gone(family)


def test_six_crashes_in_a_row_end_the_engine(start_engine: Any) -> None:
    engine = start_engine().wait_ready()
    family = engine.family()
    with engine.streams(1, 6000) as futures:
        for starts in range(1, 6):
            os.kill(engine.worker_pid(), signal.SIGKILL)
            engine.until(lambda n=starts: engine.status()["worker_starts"] > n, "restart", 60)
            engine.until(lambda: engine.status()["state"] == "serving", "serving", 60)
        os.kill(engine.worker_pid(), signal.SIGKILL)
        # A stream that got no token between two crashes is suspected, and ends alone.
        with pytest.raises(openai.APIError, match=r"keeps crashing|workers exited"):
            futures[0].result(30)
    assert engine.process.wait(20) == 1
    assert_gone(family)
    assert "keeps crashing" in engine.log_tail()


def test_restart_of_the_engine_and_the_prestop_hook_drain_first(start_engine: Any) -> None:
    engine = start_engine().wait_ready()
    with engine.streams(2, 150) as futures:
        hook = serve(
            "drain", "--admin-port", str(engine.ports()[1]), "--run-dir", str(engine.run_dir),
            "--deadline", "60",
        )  # fmt: skip
        assert hook.returncode == 0, hook.stderr
        assert all(future.result(1).usage.completion_tokens == 150 for future in futures)
    assert engine.status()["state"] == "drained"
    engine.begin("restart", "whole", scope="engine", deadline_s=5)
    assert engine.process.wait(20) == 0
    gone = serve("drain", "--admin-port", "1", "--run-dir", str(engine.run_dir), "--deadline", "1")
    assert gone.returncode == 0


def test_the_prestop_hook_is_light(tmp_path: Path) -> None:
    code = (
        "import sys, plimsoll_engine.prestop, plimsoll_engine.__main__;"
        "heavy = {'torch', 'fastapi', 'tokenizers', 'prometheus_client'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
