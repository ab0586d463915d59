"""Which processes are the engine's, what is never taken for it, and that all of them end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from plimsoll_api.admin import EngineState, ProcessNames, Role
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import CONTAINER_ENV, EngineEndpoint
from plimsoll_sidecar.act.adapters import external_engine, processes
from plimsoll_sidecar.act.adapters.external_engine import ExternalEngine
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.detect.stall import StallWatch
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.signals.process_table import identify, read_command_line
from plimsoll_sidecar.signals.sampler import Sampler
from tests.ports import free_port
from tests.unit.govern.governed import World, done

STANDIN = Path(__file__).parent / "standin_external.py"
LIMIT_S = 20.0


class Machine:
    """Processes that look like engines; whatever was started is ended with its whole session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.program = folder / "vllm"
        self.program.write_text(STANDIN.read_text())
        self.groups: list[int] = []

    def start(
        self, *arguments: str, kind: str = "vllm", within: str = "", **environment: str
    ) -> subprocess.Popen[str]:
        """``within`` is a program that starts the engine and waits for it."""
        command = [sys.executable, str(self.program), "serve", f"--kind={kind}"]
        command += [f"--port={self.port}", f"--log={self.folder}/log", *arguments]
        if within:
            command = [sys.executable, "-c", within, *command]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | environment,
        )  # fmt: skip
        self.groups.append(process.pid)
        return process

    def serving(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        process = self.start(*arguments, **more)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        return process

    def adapter(self, kind: EngineType = EngineType.VLLM, container: str = "") -> ExternalEngine:
        url = f"http://127.0.0.1:{self.port}"
        return ExternalEngine(EngineEndpoint(kind, url, url, container=container))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    one = Machine(tmp_path)
    yield one
    for group in one.groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


def restart(epoch: str) -> Command:
    return Command(
        verb=Verb.RESTART_ENGINE, operation_id="i-1", incident="i", epoch=epoch, stalled=True
    )


def eventually(seen: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def group(leader: int) -> set[int]:
    """The living processes of a session."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and identify(int(name)) is not None:
            try:
                if os.getsid(int(name)) == leader:
                    found.add(int(name))
            except ProcessLookupError:
                continue
    return found


WAITS = "import subprocess, sys; print(subprocess.call(sys.argv[1:]))"


def test_what_started_the_engine_is_not_the_engine(machine: Machine) -> None:
    """A build, a test runner, a shell: whatever it is, it gets no signal."""
    outer = machine.serving(within=WAITS)
    status = machine.adapter().status()
    assert [p.pid for p in status.processes] != [outer.pid]
    (engine,) = (p.pid for p in status.processes)
    result = machine.adapter().restart_engine(restart(status.epoch))
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert identify(engine) is None
    assert outer.wait(LIMIT_S) == 0, "the outer process was told of the end, not ended"


def test_an_engine_of_another_type_is_no_engine(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    process = machine.serving(kind="sglang")
    adapter = machine.adapter(EngineType.VLLM)
    for _ in range(3):
        with pytest.raises(
            EngineError, match="is sglang, but the supervisor is configured for vllm"
        ):
            adapter.status()
    assert len(caplog.records) == 1, "it is said once"
    assert process.poll() is None


def test_a_server_that_does_not_show_what_it_is_is_no_engine(machine: Machine) -> None:
    machine.program = machine.folder / "server.py"
    machine.program.write_text(STANDIN.read_text())
    machine.serving(kind="custom")
    with pytest.raises(EngineError, match="does not identify itself as vllm"):
        machine.adapter(EngineType.VLLM).status()
    assert machine.adapter(EngineType.CUSTOM).status().state is EngineState.SERVING


def test_an_engine_that_does_not_listen_yet_starts_and_holds_its_memory(machine: Machine) -> None:
    hold = machine.folder / "hold"
    hold.touch()
    machine.start(f"--hold={hold}", "--helpers=2")
    adapter = machine.adapter()
    assert eventually(lambda: len(adapter.list_processes()) == 3)
    sampler = Sampler(adapter)
    sample = sampler.sample()
    assert sampler.status is not None
    assert sampler.status.state is EngineState.STARTING
    assert (sample.ready, sample.host.processes) == (False, 3)
    hold.unlink()
    epoch = sampler.status.epoch

    def serving_in_the_same_epoch() -> bool:
        status = adapter.status()
        return status.state is EngineState.SERVING and status.epoch == epoch

    assert eventually(serving_in_the_same_epoch)


def test_an_engine_that_begins_to_listen_during_a_status_call_is_starting(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = machine.folder / "hold"
    hold.touch()
    machine.start(f"--hold={hold}")
    adapter = machine.adapter()
    assert eventually(lambda: len(adapter.list_processes()) == 1)
    with socket.socket() as late:

        def refused(*_: object) -> None:
            late.bind(("127.0.0.1", machine.port))
            late.listen()
            raise EngineError("connection refused")

        monkeypatch.setattr(adapter._server, "call", refused)
        assert adapter.status().state is EngineState.STARTING


def test_the_next_engine_is_seen_while_it_starts(machine: Machine) -> None:
    """Its memory was nobody's for as long as it did not listen."""
    first = machine.serving()
    sampler = Sampler(machine.adapter())
    assert sampler.sample().host.processes == 1
    first.kill()
    first.wait(LIMIT_S)
    assert sampler.sample().host.processes == 0
    hold = machine.folder / "hold"
    hold.touch()
    machine.start(f"--hold={hold}")
    assert eventually(lambda: sampler.sample().host.processes == 1)
    assert sampler.status is not None
    assert sampler.status.state is EngineState.STARTING


def test_processes_have_the_engine_s_names_for_them(machine: Machine) -> None:
    machine.serving("--helpers=1", "--title=VLLM::EngineCore", "--title=VLLM::Worker_TP0")
    sampler = Sampler(machine.adapter())
    labels, seen, deadline = (
        ["APIServer", "EngineCore", "Worker", "other"],
        [""],
        time.monotonic() + LIMIT_S,
    )
    # A process that was just forked has its parent's command line for a moment.
    while sorted(seen) != labels and time.monotonic() < deadline:
        sample = sampler.sample()
        seen = [one.role for one in sample.host.by_process or []]
    assert sorted(seen) == labels
    assert sample.parts == ProcessNames("APIServer", "EngineCore", "Worker")
    assert sampler.status is not None
    assert sorted(p.label for p in sampler.status.processes) == labels


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_ends_every_process(machine: Machine, number: signal.Signals) -> None:
    """SIGKILL is for a main process that is stopped: it does not answer SIGTERM."""
    process = machine.serving("--helpers=2")
    adapter = machine.adapter()
    status = adapter.status()
    assert len(status.processes) == 3
    if number is signal.SIGKILL:
        os.kill(process.pid, signal.SIGSTOP)
    frontend = next(p.pid for p in status.processes if p.role is Role.FRONTEND)
    ending = adapter.end_processes(identify(frontend))
    assert ending.error is None
    assert ("by SIGKILL" in ending.summary) == (number is signal.SIGKILL)
    assert "still running" in ending.summary
    assert "ended after SIGTERM" in ending.summary
    process.wait(LIMIT_S)
    assert group(process.pid) == set()


def test_a_server_that_ended_its_own_core_is_not_waited_for(machine: Machine) -> None:
    """At SIGTERM vLLM 0.32 kills its core and waits for streams that nothing feeds any more."""
    process = machine.serving("--outstays", "--helpers=1", "--title=VLLM::EngineCore")
    adapter = machine.adapter()
    status = adapter.status()
    begin = time.monotonic()
    result = adapter.restart_engine(
        msgspec.structs.replace(restart(status.epoch), stalled=False, deadline_s=30.0)
    )
    assert result.outcome is Outcome.SUCCEEDED, result
    assert f"process {process.pid} was killed by SIGKILL" in result.message
    assert time.monotonic() - begin < 15.0, "its grace is 60 s"
    process.wait(LIMIT_S)
    assert group(process.pid) == set()


def test_a_server_whose_core_works_on_has_its_grace(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_engine, "EXIT_GRACE_S", 6.5)
    process = machine.serving("--title=VLLM::EngineCore")
    adapter = machine.adapter()
    status = adapter.status()
    os.kill(process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    result = adapter.restart_engine(
        msgspec.structs.replace(restart(status.epoch), stalled=False, deadline_s=0.0)
    )
    assert result.outcome is Outcome.SUCCEEDED, result
    assert time.monotonic() - begin >= 6.5


def test_what_a_killed_frontend_left_is_known_and_ended(machine: Machine) -> None:
    process = machine.serving("--helpers=2")
    adapter = machine.adapter()
    sampler = Sampler(adapter)
    sampler.sample()
    frontend = identify(process.pid)
    process.kill()
    process.wait(LIMIT_S)
    with pytest.raises(EngineError, match="main process has ended, but its processes"):
        adapter.status()
    sample = sampler.sample()
    assert (sample.host.processes, sample.host.frontend_lives) == (2, False)
    stopped, other = sorted(group(process.pid))
    os.kill(stopped, signal.SIGSTOP)  # it does not answer SIGTERM
    ending = adapter.end_processes(frontend)
    assert ending.error is None, ending
    assert "still running" in ending.summary
    ended = f"process {other} ended after SIGTERM; process {stopped} ended after SIGKILL"
    assert ended in ending.summary
    assert group(process.pid) == set()


def killed_unseen(machine: Machine, folder: Path) -> list[int]:
    """The parts that an engine left in its container before anybody looked, by PID."""
    hold = machine.folder / "hold"
    hold.touch()
    titles = ["--title=VLLM::EngineCore", "--title=VLLM::Worker"]
    outer = machine.start(
        f"--hold={hold}", *titles, within=in_container(folder), **{CONTAINER_ENV: "vllm"}
    )

    def lines() -> dict[int, list[str]]:
        pids = map(int, (folder / "cgroup.procs").read_text().split())
        return {pid: read_command_line(pid) for pid in pids}

    def parts() -> list[int]:
        return [pid for pid, line in lines().items() if line[:1] and "VLLM::" in line[0]]

    assert eventually(lambda: len(parts()) == 2)
    left = parts()
    for pid in lines().keys() - set(left):
        os.kill(pid, signal.SIGKILL)
    outer.wait(LIMIT_S)
    assert eventually(lambda: sorted(lines()) == sorted(left))
    return left


def test_an_engine_that_was_killed_before_anybody_saw_it_has_ended(
    machine: Machine, groups: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a known epoch no incident opened, and its processes kept their memory."""
    left = killed_unseen(machine, groups("engine"))
    adapter = machine.adapter(container="vllm")
    sampler = Sampler(adapter)
    host = sampler.sample().host
    assert (host.processes, host.frontend_lives) == (2, None), "a start may be on its way"
    monkeypatch.setattr(processes, "MIN_ORPHAN_AGE_S", 0.0)
    watch, world = StallWatch(120.0, 1.0), World()
    world.answers = world.suspect = False
    command, second = None, 0
    while command is None or command.verb is not Verb.RESTART_ENGINE:
        sample = sampler.sample()
        sample.t = float(second)
        suspicion = watch.update(sample)
        world.besides = [suspicion] if suspicion else []
        command = world.tick(*([done(command)] if command else []))
        second += 1
        assert second < 120
    assert "main process ended, but its other processes" in world.open[0].attribution.evidence[0]
    with pytest.raises(EngineError, match="main process has ended, but its processes"):
        adapter.status()
    ending = adapter.end_processes(None)
    assert ending.error is None
    assert "ended after SIGTERM" in ending.summary
    assert not any(identify(pid) for pid in left)


def test_what_an_unseen_engine_left_is_swept_beside_the_next(
    machine: Machine, groups: Callable[[str], Path]
) -> None:
    folder = groups("engine")
    left = killed_unseen(machine, folder)
    adapter = machine.adapter(container="vllm")
    assert {p.pid for p in adapter.list_processes()} == set(left)
    (machine.folder / "hold").unlink()
    machine.serving("--helpers=1", within=in_container(folder), **{CONTAINER_ENV: "vllm"})
    assert adapter.status().state is EngineState.SERVING
    assert "ended" in adapter.end_leftover_processes()
    assert not any(identify(pid) for pid in left)
    assert adapter.status().state is EngineState.SERVING


def test_the_next_engine_outlives_the_end_of_what_the_last_one_left(machine: Machine) -> None:
    first = machine.serving("--helpers=1")
    adapter = machine.adapter()
    adapter.status()
    known = identify(first.pid)
    first.kill()
    first.wait(LIMIT_S)
    second = machine.serving("--helpers=1")
    assert adapter.end_processes(known).error is None
    assert group(first.pid) == set()
    assert len(group(second.pid)) == 2


def test_what_a_killed_engine_left_to_the_next_is_swept(machine: Machine) -> None:
    first = machine.serving("--helpers=2")
    adapter = machine.adapter()
    adapter.status()
    first.kill()
    first.wait(LIMIT_S)
    second = machine.serving("--helpers=1")
    assert adapter.status().processes
    assert "ended" in adapter.end_leftover_processes()
    assert group(first.pid) == set()
    assert len(group(second.pid)) == 2
    assert adapter.end_leftover_processes() == ""


def test_a_name_in_the_environment_decides(machine: Machine) -> None:
    """The engine is the program that was started as it, whichever program listens at the port."""
    hold = machine.folder / "hold"
    hold.touch()
    engine = machine.start(f"--hold={hold}", "--helpers=1", **{CONTAINER_ENV: "engine"})
    machine.serving()  # as a proxy does, while the engine is not there yet
    adapter = machine.adapter(container="engine")
    assert eventually(lambda: {p.pid for p in adapter.list_processes()} == group(engine.pid))


def in_container(folder: Path, *options: str) -> str:
    """A program that starts the rest of its command line in a memory group and mounts of its own,
    as a container runtime does."""
    return (
        "import os, subprocess, sys\n"
        f"open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        f"os.execvp('unshare', ['unshare', '--mount', *{options!r}, *sys.argv[1:]])\n"
    )


@pytest.fixture
def groups() -> Iterator[Callable[[str], Path]]:
    """Memory groups by name. They need root; what is without is run by the node tier alone."""
    parent = Path("/sys/fs/cgroup/memory")
    parent = parent if parent.is_dir() else Path("/sys/fs/cgroup")
    made: list[Path] = []

    def make(name: str) -> Path:
        folder = parent / f"plimsoll-test-{secrets.token_hex(4)}-{name}"
        try:
            folder.mkdir()
        except OSError as error:
            pytest.skip(f"no memory group can be made here: {error}")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        assert eventually(partial(_gone, folder)), folder


def _gone(folder: Path) -> bool:
    for pid in (folder / "cgroup.procs").read_text().split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def test_a_container_is_the_engine_whoever_started_what(
    machine: Machine, groups: Callable[[str], Path]
) -> None:
    """Helpers that were left by their parents are in it, and a proxy's container is not."""
    engine = groups("engine")
    outer = machine.serving("--helpers=2", within=in_container(engine), **{CONTAINER_ENV: "vllm"})
    machine.port, serving = free_port(), machine.port
    machine.serving("--helpers=1", within=in_container(groups("proxy")))
    machine.port = serving
    adapter = machine.adapter(container="vllm")
    status = adapter.status()
    inside = {int(pid) for pid in (engine / "cgroup.procs").read_text().split()}
    assert {p.pid for p in status.processes} == inside
    main = next(p.pid for p in status.processes if p.role is Role.FRONTEND)
    os.kill(main, signal.SIGKILL)
    outer.wait(LIMIT_S)
    ending = adapter.end_processes(None)
    assert ending.error is None
    assert (engine / "cgroup.procs").read_text() == ""


FIND = """
import os, sys
from plimsoll_api.engines import EngineType
from plimsoll_sidecar.signals.engine_processes import EngineFinder
found = EngineFinder(int(sys.argv[1]), EngineType.VLLM, "vllm").find_processes()
print(*[process.pid for process in found.processes])
"""


def test_groups_that_a_container_made_are_part_of_it(
    machine: Machine, groups: Callable[[str], Path]
) -> None:
    """Seen from a cgroup namespace, as that of a supervisor on a node with version 2."""
    engine, own = groups("engine"), groups("supervisor")
    machine.serving("--helpers=2", within=in_container(engine), **{CONTAINER_ENV: "vllm"})
    inside = {int(pid) for pid in (engine / "cgroup.procs").read_text().split()}
    nested = engine / "workers"
    nested.mkdir()
    (nested / "cgroup.procs").write_text(str(max(inside)))
    command = [sys.executable, "-c", in_container(own, "--cgroup")]
    command += [sys.executable, "-c", FIND, str(machine.port)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert eventually(partial(_gone, nested))
    assert {int(pid) for pid in found.stdout.split()} == inside, found.stderr


def test_pods_of_an_earlier_release_are_known_by_their_port(
    machine: Machine, groups: Callable[[str], Path]
) -> None:
    engine = groups("engine")
    machine.serving("--helpers=1", within=in_container(engine))
    status = machine.adapter(container="vllm").status()
    inside = {int(pid) for pid in (engine / "cgroup.procs").read_text().split()}
    assert {p.pid for p in status.processes} == inside
    assert len(inside) == 2


SLEEPS = "import time; time.sleep(600)"
TRACKER = [sys.executable, "-c", f"{SLEEPS}; from multiprocessing.resource_tracker import main"]


@pytest.mark.parametrize(
    "command",
    [TRACKER, ["vllm", "serve", "m", "--port=1"]],
    ids=["another program's tracker", "another port"],
)
def test_another_container_is_not_the_engine(
    machine: Machine, groups: Callable[[str], Path], command: list[str]
) -> None:
    """Here while the engine is away: the next restart would have ended it."""
    if command[0] == "vllm":
        command = [sys.executable, str(machine.program), "serve", "--kind=vllm", "--hold=/"]
        command += [f"--log={os.devnull}", "--port=1"]
    folder = groups("beside")
    within = [sys.executable, "-c", in_container(folder), *command]
    process = subprocess.Popen(within, start_new_session=True)
    machine.groups.append(process.pid)
    line = "\0".join([*command, ""])
    assert eventually(lambda: Path(f"/proc/{process.pid}/cmdline").read_text() == line)
    assert machine.adapter().list_processes() == []
    assert process.poll() is None


def test_an_engine_in_a_nested_pid_namespace_is_another_pods(
    machine: Machine, groups: Callable[[str], Path]
) -> None:
    folder, hold = groups("pod"), machine.folder / "hold"
    hold.touch()
    machine.start(f"--hold={hold}", within=in_container(folder, "--pid", "--fork"))

    def serves() -> bool:
        pids = (folder / "cgroup.procs").read_text().split()
        return any(read_command_line(int(pid))[1:2] == [str(machine.program)] for pid in pids)

    assert eventually(serves)
    assert machine.adapter().list_processes() == []
