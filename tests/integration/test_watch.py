"""``plimsoll watch`` beside real processes: by URL, PID, container, and a command of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from docs.tools.blocks import ROOT, blocks
from tests.desk import LIMIT_S, PROGRAM, Desk

STANDIN = Path(__file__).parent / "standin_external.py"
QUICK = ("--warmup=2s", "--host-budget=64Mi", "--window=1h")


class Standin(Desk):
    """With an engine that looks like vLLM, and leaks once it is sick."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder)
        self.sick = folder / "sick"
        self.engine_program = folder / "vllm"
        self.engine_program.write_text(f"#!{sys.executable}\n{STANDIN.read_text()}")
        self.engine_program.chmod(0o755)

    def serve(self, *arguments: str, within: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        return self.start(*within, *self.serving(*arguments))

    def serving(self, *arguments: str) -> list[str]:
        command = [str(self.engine_program), "serve", "--kind=vllm", f"--port={self.port}"]
        return [*command, f"--log={self.folder}/log", f"--sick={self.sick}", *arguments]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Standin]:
    one = Standin(tmp_path)
    yield one
    one.end()


def test_a_leak_of_a_running_engine_is_told_in_the_terminal_and_on_the_page(desk: Standin) -> None:
    desk.sick.touch()
    engine = desk.serve("--leak-mib-s=8")
    desk.until(desk.answers)
    began = time.monotonic()
    watching = desk.watch(f"http://localhost:{desk.port}", *QUICK)
    desk.until(lambda: "memory by segment: " in desk.told())
    assert time.monotonic() - began < LIMIT_S, "first figures within a minute"
    desk.until(lambda: ": HostGrowth in anonymous_other" in desk.told())
    assert "HostGrowth" in httpx.get(desk.page()).text
    watching.send_signal(signal.SIGINT)
    assert watching.wait(30) == 0, desk.told()
    assert engine.poll() is None, "what is watched runs on"
    assert not (desk.folder / "log").exists(), "in Observe nothing is sent to the engine"
    listed = desk.run("incidents", "--local")
    assert "HostGrowth" in listed
    (name,) = set(re.findall(rf"vllm-{desk.port}-\w+", listed))
    assert "anonymous_other" in desk.run("explain", name, "--local")


def test_a_process_is_watched_until_it_ends(desk: Standin) -> None:
    """Also one that serves nothing, by any user's program."""
    held = "held = bytearray(64 << 20); held[::4096] = held[::4096]; import time; time.sleep(600)"
    process = desk.start(sys.executable, "-c", held)
    watching = desk.watch(str(process.pid), *QUICK)
    desk.until(lambda: "warm-up has ended: " in desk.told())
    assert "engine type custom, its API does not answer" in desk.told()
    process.kill()
    process.wait(10)
    assert watching.wait(30) == 0, desk.told()
    assert f"process {process.pid} has ended" in desk.told()


def test_the_quick_start_needs_no_engine(desk: Standin) -> None:
    page = ROOT / "docs" / "quickstart.md"
    (block,) = (one for one in blocks(page, "sh") if "examples/leak.py" in one.text)
    program = block.text.replace("plimsoll ", f"{PROGRAM} ")
    done = desk.start("bash", "-c", f"cd {ROOT}\n{program}", out=desk.out)
    assert done.wait(2 * LIMIT_S) == 0, desk.told()
    assert ": HostGrowth in anonymous_other" in desk.told()


def test_a_part_of_an_engine_stands_for_all_of_it(desk: Standin) -> None:
    engine = desk.serve("--title=VLLM::EngineCore")
    desk.until(desk.answers)
    children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    desk.watch(children[0], *QUICK)
    desk.until(lambda: "memory by segment: " in desk.told())
    first = desk.told().splitlines()[0]
    api = f"http://127.0.0.1:{desk.port}"
    assert f"process {engine.pid}, engine type vllm, API at {api}" in first


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for namespaces of its own")
def test_a_container_is_followed_to_its_next_start(desk: Standin) -> None:
    """With a runtime that only says what Docker would: the processes and namespaces are real."""
    inspected = desk.folder / "inspected.json"
    runtime = desk.folder / "docker"
    runtime.write_text(f'#!/bin/sh\n[ "$1 $2" = "inspect llm" ] && cat {inspected}\n')
    runtime.chmod(0o755)
    unshare = ("unshare", "--net", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")

    def start() -> int:
        outer = desk.serve(within=unshare)
        inner = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        desk.until(lambda: inner.read_text().strip())
        pid = int(inner.read_text())
        desk.until(lambda: b"vllm" in Path(f"/proc/{pid}/cmdline").read_bytes())
        settings: dict[str, dict[str, str]] = {"Ports": {}, "Networks": {}}
        state = [{"Name": "/llm", "State": {"Pid": pid}, "NetworkSettings": settings}]
        inspected.write_text(json.dumps(state))
        return pid

    first = start()
    desk.watch("llm", *QUICK)
    desk.until(lambda: "memory by segment: " in desk.told())
    assert f"watching llm: process {first}, engine type vllm" in desk.told()
    os.kill(first, signal.SIGKILL)
    desk.until(lambda: "llm has ended; waiting until it runs again" in desk.told())
    second = start()
    desk.until(lambda: f"llm runs again as process {second}" in desk.told())
    desk.until(lambda: f"-{second}:" in desk.state())


def test_an_engine_of_its_own_is_restarted_when_it_leaks(desk: Standin) -> None:
    desk.sick.touch()
    desk.watch(*QUICK, "--recover", "--", *desk.serving("--leak-mib-s=8"))
    desk.until(lambda: " Resolved (EngineRestart): HostGrowth" in desk.told(), 2 * LIMIT_S)
    assert "engine ended with status 0, restarting" in desk.told()
    assert (desk.folder / "log").read_text().count("SIGTERM") == 1
    desk.until(desk.answers)
