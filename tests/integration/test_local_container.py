"""A container of local mode: started again, stopped in time, and nothing of it is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from plimsoll_cli import stopping
from plimsoll_cli.local.container import Container, describe_exit
from plimsoll_cli.local.plan import Command


def container(tmp_path: Path, script: str, exits: list[str]) -> Container:
    argv = (sys.executable, "-u", "-c", script)
    return Container(
        Command("engine", argv, dict(os.environ), tmp_path / "engine.log"), exits.append
    )


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def until(probe: Callable[[], object], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not probe():  # noqa: ASYNC110 - other processes set it
            await asyncio.sleep(0.05)


def run(case: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(case(), 60))


def test_a_process_that_ends_is_started_again(tmp_path: Path) -> None:
    exits: list[str] = []
    one = container(tmp_path, "print('hello'); raise SystemExit(3)", exits)

    async def case() -> None:
        one.start()
        await until(lambda: one.read_log_tail().count("hello") >= 2)
        await one.stop(5)

    run(case)

    assert one.starts >= 2
    assert exits[0] == "engine ended with status 3, restarting"
    assert one.last_exit == "ended with status 3"


def test_restarts_slow_down(tmp_path: Path) -> None:
    exits: list[str] = []
    one = container(tmp_path, "raise SystemExit(1)", exits)

    async def case() -> None:
        one.start()
        began = time.monotonic()
        await until(lambda: one.starts == 4)
        assert time.monotonic() - began > 3  # the first at once, then after 1 s and 2 s
        await one.stop(5)

    run(case)


def test_the_end_of_the_first_process_ends_the_others(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(300)"
    )
    one = container(tmp_path, script, [])

    async def case() -> None:
        one.start()
        await until(lambda: child.exists() and child.read_text())
        pid = int(child.read_text())
        assert alive(pid)
        assert one.pid is not None
        os.kill(one.pid, signal.SIGKILL)
        await until(lambda: not alive(pid))
        await one.stop(5)

    run(case)

    assert one.last_exit == "was killed by SIGKILL"


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf'); time.sleep(300)"
    )
    one = container(tmp_path, script, [])

    async def case() -> None:
        one.start()
        await until(lambda: "deaf" in one.read_log_tail())
        pid, began = one.pid, time.monotonic()
        await one.stop(1.0)
        assert 1.0 <= time.monotonic() - began < 5.0
        assert pid is not None
        assert not alive(pid)

    run(case)


def test_a_process_dies_with_whoever_started_it(tmp_path: Path) -> None:
    """The parent is killed with SIGKILL: it can clean up nothing."""
    log = tmp_path / "engine.log"
    parent = subprocess.Popen(
        [
            sys.executable, "-c",
            "import subprocess, sys, os\n"
            "guard = [sys.executable, '-m', 'plimsoll_cli.local.parent_death', str(os.getpid())]\n"
            "child = subprocess.Popen([*guard, '/bin/sleep', '300'])\n"
            f"open({str(log)!r}, 'w').write(str(child.pid))\n"
            "child.wait()",
        ]
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not _is_sleep(log):
            time.sleep(0.05)
        pid = int(log.read_text())
        assert alive(pid)
    finally:
        parent.kill()
        parent.wait(10)

    while time.monotonic() < deadline and alive(pid):
        time.sleep(0.05)
    assert not alive(pid)


def _is_sleep(log: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return Path(f"/proc/{int(log.read_text())}/cmdline").read_bytes()[:10] == b"/bin/sleep"
    return False


def test_a_command_that_does_not_exist_is_an_exit_with_its_message(tmp_path: Path) -> None:
    command = Command("engine", ("/no/such/program",), dict(os.environ), tmp_path / "engine.log")
    one = Container(command, lambda line: None)

    async def case() -> None:
        one.start()
        await until(lambda: one.last_exit)
        await one.stop(5)

    run(case)

    assert "No such file or directory" in one.read_log_tail()


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    command = Command(
        "engine", ("/bin/true",), dict(os.environ), tmp_path / "absent" / "engine.log"
    )
    one = Container(command, lambda line: None)

    async def case() -> None:
        one.start()

        def checks() -> bool:
            one.raise_start_error()
            return False

        with pytest.raises(FileNotFoundError):
            await until(checks)

    run(case)


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "ended with status 0"), (-9, "was killed by SIGKILL"), (-70, "was killed by signal 70")],
)
def test_an_exit_status_in_words(status: int, text: str) -> None:
    assert describe_exit(status) == text


def test_a_signal_cancels_and_the_block_ends_in_order() -> None:
    said: list[str] = []

    async def main() -> None:
        try:
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            said.append("stopping")
            await asyncio.sleep(0.01)
            said.append("stopped")

    assert not stopping.run_until_signal(main())
    assert said == ["stopping", "stopped"]


def test_an_error_beside_the_block_is_raised_at_its_end() -> None:
    async def broken() -> None:
        raise LookupError("the view")

    async def main() -> None:
        async with stopping.run_in_background(broken(), asyncio.sleep(30)):
            await asyncio.sleep(0.05)

    with pytest.raises(LookupError, match="the view"):
        stopping.run_until_signal(main())


def test_an_error_of_the_block_is_raised_as_it_is() -> None:
    async def main() -> None:
        async with stopping.run_in_background(asyncio.sleep(30)):
            raise KeyError("the block")

    with pytest.raises(KeyError):
        stopping.run_until_signal(main())
