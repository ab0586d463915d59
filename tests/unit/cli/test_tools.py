"""init and bench: what they write, what they say of bad input, and that flags are complete."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_cli import bench, starter
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.main import app


def test_questions_are_asked_only_for_what_no_flag_says() -> None:
    asked: list[str] = []

    def ask(question: str, default: str) -> str:
        asked.append(question)
        return default or "file:///m"

    answers = starter.ask_missing_fields({"name": "x", "gpus": 0, "mode": "Recover"}, ask)
    assert len(asked) == len(starter.QUESTIONS) - 3
    spec = InferenceService.model_validate(yaml.safe_load(starter.format_manifest(answers))).spec
    assert spec.supervision.mode.value == "Recover"
    assert spec.engine.args == ["--device=cpu", "--dtype=float32"]
    assert spec.memory.device is None
    with pytest.raises(UsageError, match="replicas: 'two' is not an integer"):
        starter.ask_missing_fields({"replicas": "two"}, ask)


def test_a_manifest_that_would_be_refused_names_its_fields() -> None:
    with pytest.raises(UsageError, match=r"spec\.model\.uri"):
        starter.format_manifest(starter.ManifestFields(name="x", model="nowhere"))
    fields = starter.ManifestFields("x", "file:///m", memory="1Gi", host_budget="2Gi")
    with pytest.raises(UsageError, match="growthBudget"):
        starter.format_manifest(fields)
    fields = starter.ManifestFields("x", "file:///m", memory="24")
    with pytest.raises(UsageError, match="--memory: '24' is only 24 B: add a unit, for example Gi"):
        starter.format_manifest(fields)


def test_init_without_a_terminal_names_what_is_missing() -> None:
    for given, missing in (([], "the argument NAME"), (["x"], "the option --model")):
        done = CliRunner().invoke(app, ["init", *given])
        assert isinstance(done.exception, UsageError)
        assert f"add {missing}" in str(done.exception)
    done = CliRunner().invoke(app, ["init", "x", "--model", "file:///m", "--yes"])
    assert yaml.safe_load(done.stdout)["metadata"]["name"] == "x"


def test_figures_of_a_bench() -> None:
    found = [
        bench.RequestTiming(sent=0.0, chunks=[1.0, 1.5, 2.0], tokens=3),
        bench.RequestTiming(sent=0.0, error="HTTP 500"),
        bench.RequestTiming(sent=1.0, chunks=[1.2], tokens=1),
    ]
    values = bench.summarize_timings(found, duration_s=2.0)
    assert values["request_count"] == 3
    assert values["failed_count"] == 1
    assert values["output_tok_s"] == 2.0
    assert values["ttft_p99_s"] == 1.0
    assert values["itl_p50_s"] == 0.5
    assert bench.summarize_timings([bench.RequestTiming(0.0, error="x")], 1.0)["ttft_p50_s"] is None


def test_an_endpoint_that_is_away_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(RunError, match=url):
        asyncio.run(bench.run_load(bench.LoadProfile(url, "m", 2, 1, 1), lambda: None))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_there(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PLIMSOLL_COMPLETE", f"source_{shell}")
    done = CliRunner().invoke(app, [], prog_name="plimsoll")
    assert "plimsoll" in done.output


def test_every_command_has_help_and_every_flag_a_meaning() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for command in (
        "run", "watch", "demo", "record", "replay", "tune", "top", "incidents", "explain", "doctor",
        "verdict", "trim", "drain", "restart", "resume", "inject", "init", "bench", "version",
    ):  # fmt: skip
        assert f"\n  {command} " in listed
        shown = CliRunner().invoke(app, [command, "--help"])
        assert shown.exit_code == 0
        usage = shown.stdout.splitlines()[0]
        assert not re.search(r"[\[{][a-z]", usage), f"{usage}: arguments are in upper case"


def test_the_version_is_told_as_other_programs_do() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert told.exit_code == 0
    assert told.stdout == CliRunner().invoke(app, ["version"]).stdout


def test_json_of_local_incidents_is_a_list(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["incidents", "--local", "-o", "json"])
    assert json.loads(done.stdout) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("command", [["version"], ["init", "chat", "--model=pvc://m/m", "--yes"]])
def test_a_full_disk_is_told_in_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "plimsoll_cli.main", *command],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "plimsoll: [Errno 28] No space left on device\n")
