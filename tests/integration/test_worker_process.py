"""A real zygote and real workers over real sockets, driven by a small frontend of the tests."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from plimsoll_api.admin import Role
from plimsoll_engine.frontend.workers.zygote_client import SINGLE_THREAD_ENVIRONMENT
from plimsoll_engine.messages import worker_ipc, zygote_ipc
from plimsoll_engine.messages.framing import FrameReader
from plimsoll_engine.messages.handover import HandoverOutcome
from plimsoll_engine.messages.worker_ipc import Sampling, Submit
from plimsoll_engine.messages.zygote_ipc import Exited, Fork, Forked, WorkerConfig, ZygoteReady
from plimsoll_engine.process.stacks import make_stacks_path
from plimsoll_faults.models.tiny import write_checkpoint
from tests.integration.engine.warm import ZYGOTE, WarmProcess

M = TypeVar("M")
WAIT_S = 120.0
PROMPT = list(range(40, 60))
IMPORT = "import time:"
"""How the lines of ``python -X importtime`` begin."""


class Link:
    """One socket and the messages on it; every wait has a bound. Stages of a start are dropped."""

    def __init__(self, end: socket.socket, decode: Callable[[bytes], Any]) -> None:
        self.socket = end
        self.decode = decode
        self.reader = FrameReader()
        self.inbox: list[Any] = []

    def next(self, timeout_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self.inbox:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.socket], [], [], left)[0]:
                raise TimeoutError(f"nothing arrived within {timeout_s} s")
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError("closed by the other side")
            found = [self.decode(body) for body in self.reader.feed(data)]
            self.inbox += [one for one in found if not isinstance(one, worker_ipc.StartupStage)]
        return self.inbox.pop(0)

    def wait_for(self, kind: type[M], timeout_s: float = WAIT_S) -> M:
        """The next message of ``kind``; those before it are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.next(max(0.0, deadline - time.monotonic()))
            if isinstance(message, kind):
                return message


class Harness:
    """A zygote and its control socket. A ``warm`` one has a short start and tells no imports."""

    def __init__(self, checkpoint: Path, warm: bool = False, **config: Any) -> None:
        # Short: the path of a Unix socket has at most 107 bytes.
        self.folder = tempfile.TemporaryDirectory(prefix="plw-")
        self.run_dir = Path(self.folder.name)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(self.run_dir / "worker.sock"))
        self.server.listen()
        self.server.settimeout(WAIT_S)
        defaults: dict[str, Any] = {
            "model": str(checkpoint), "run_dir": str(self.run_dir), "device": "cpu",
            "socket": str(self.run_dir / "worker.sock"), "num_blocks": 512,
            "weights": str(self.run_dir / "weights.sock"),
        }  # fmt: skip
        ours, theirs = socket.socketpair()
        weights = zygote_ipc.listen(str(self.run_dir / "weights.sock"))
        body = msgspec.json.encode(WorkerConfig(**(defaults | config))).decode()
        self.stderr = self.run_dir / "stderr"
        self.process: subprocess.Popen[bytes] | WarmProcess
        fds = [theirs.fileno(), weights.fileno()]
        arguments = ["--control-fd", str(fds[0]), "--weights-fd", str(fds[1]), "--config", body]
        if warm:
            self.process = WarmProcess(arguments, self.stderr, os.environ, ZYGOTE, fds)
        else:
            command = [sys.executable, "-X", "importtime", "-m", ZYGOTE, *arguments]
            with self.stderr.open("wb") as stderr:
                self.process = subprocess.Popen(
                    command, pass_fds=fds, stderr=stderr, env=os.environ | SINGLE_THREAD_ENVIRONMENT
                )
        theirs.close()
        weights.close()
        self.control = Link(ours, self._from_zygote)
        self.expected_status = 0
        self.pids: list[int] = []
        self.ended: set[int] = set()
        self.links: list[Link] = []
        self.ready = self.control.wait_for(ZygoteReady)
        self.weight_server = self.fork_weight_server(1)

    def fork_weight_server(self, number: int) -> int:
        self.control.socket.sendall(zygote_ipc.encode_frame(Fork(number, Role.WEIGHT_SERVER)))
        forked = self.control.wait_for(Forked)
        assert (forked.number, forked.role) == (number, Role.WEIGHT_SERVER)
        self.pids.append(forked.pid)
        return forked.pid

    def fork(self, epoch: int) -> tuple[int, Link]:
        """A worker that said Hello: (pid, its link)."""
        self.control.socket.sendall(zygote_ipc.encode_frame(Fork(epoch)))
        forked = self.control.wait_for(Forked)
        self.pids.append(forked.pid)
        connection, _ = self.server.accept()
        link = Link(connection, worker_ipc.from_worker_decoder.decode)
        self.links.append(link)
        assert link.next() == worker_ipc.Hello(epoch, forked.pid)
        return forked.pid, link

    def _from_zygote(self, body: bytes) -> zygote_ipc.FromZygote:
        message: zygote_ipc.FromZygote = zygote_ipc.from_zygote_decoder.decode(body)
        if isinstance(message, Exited):
            self.ended.add(message.pid)
        return message

    def serving(self, epoch: int) -> tuple[int, Link]:
        pid, link = self.prepared(epoch)
        take_over(link)
        return pid, link

    def prepared(self, epoch: int) -> tuple[int, Link]:
        """A successor that waits for its turn."""
        pid, link = self.fork(epoch)
        prepared = link.next()
        assert isinstance(prepared, worker_ipc.Prepared), prepared
        return pid, link

    def exit_of(self, pid: int) -> Exited:
        """The end of ``pid``; those of other processes are dropped."""
        while (exited := self.control.wait_for(Exited)).pid != pid:
            pass
        return exited

    def imports(self) -> list[str]:
        """The modules that the zygote and its children have imported, one entry for each time."""
        lines = self.stderr.read_text().splitlines()
        return [line.split("|")[-1].strip() for line in lines if line.startswith(IMPORT)]

    def dismiss_workers(self) -> None:
        """End every worker, whatever the test did, and wait until the zygote has reaped it."""
        for link in self.links:
            link.socket.close()
        while not self.ended.issuperset(set(self.pids) - {self.weight_server}):
            self.control.next()
        self.links.clear()
        self.control.inbox.clear()
        if self.weight_server in self.ended:
            self.weight_server = self.fork_weight_server(len(self.pids))

    def close(self) -> None:
        self.control.socket.close()
        assert self.process.wait(10) == self.expected_status
        assert eventually(lambda: not any(map(alive, self.pids))), "a worker outlived its zygote"
        self.server.close()
        said = self.stderr.read_text().splitlines(keepends=True)
        sys.stderr.writelines(line for line in said if not line.startswith(IMPORT))
        self.folder.cleanup()


def send(link: Link, *messages: worker_ipc.ToWorker) -> None:
    for message in messages:
        link.socket.sendall(worker_ipc.encode_frame(message))


def take_over(link: Link) -> None:
    send(link, worker_ipc.TakeOver())
    ready = link.next()
    assert isinstance(ready, worker_ipc.Ready), ready


def generate(link: Link, names: list[str], new: int, **carried: list[int]) -> dict[str, list[int]]:
    """Submit and collect; every request ends by length."""
    for name in names:
        submit = Submit(name, [*PROMPT, ord(name[0])], Sampling(max_tokens=new))
        submit.output_ids = carried.get(name, [])
        send(link, submit)
    found: dict[str, list[int]] = {name: [] for name in names}
    left = set(names)
    while left:
        for token in link.wait_for(worker_ipc.Tokens).tokens:
            found[token.request_id].append(token.token_id)
            if token.finish_reason is not None:
                assert token.finish_reason == "length"
                left.remove(token.request_id)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def healthy(checkpoint: Path) -> Iterator[Harness]:
    """One zygote for many tests; importing torch takes seconds."""
    harness = Harness(checkpoint)
    yield harness
    assert harness.process.poll() is None
    harness.close()


@pytest.fixture
def shared(healthy: Harness) -> Iterator[Harness]:
    """The zygote and its weight server, without a worker of an earlier test."""
    yield healthy
    healthy.dismiss_workers()


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., Harness]]:
    """Zygotes for one test; each must end with status 0 when its frontend goes."""
    started: list[Harness] = []

    def make(**config: Any) -> Harness:
        started.append(Harness(checkpoint, warm=True, **config))
        return started[-1]

    yield make
    for harness in started:
        harness.close()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_worker_serves_reports_and_stops_and_its_successor_carries_on(
    shared: Harness,
) -> None:
    harness = shared
    pid, link = harness.serving(1)
    whole = generate(link, ["a", "b", "c"], 60)
    assert all(len(tokens) == 60 for tokens in whole.values())
    assert len({tuple(tokens) for tokens in whole.values()}) == 3

    report = link.wait_for(worker_ipc.Report, 2.0)
    report = link.wait_for(worker_ipc.Report, 2.0)
    assert (report.load.running, report.load.waiting) == (0, 0)
    assert report.load.requests_total == 3
    assert report.load.generation_tokens_total == 180
    assert report.memory.pid == pid
    assert report.memory.malloc_in_use is not None
    assert report.devices == []
    owners = {entry.owner: entry for entry in report.ledger}
    assert owners.keys() >= {"weights", "kv_pool", "prefix_cache", "requests"}
    assert owners["weights"].process is Role.WEIGHT_SERVER
    assert owners["kv_pool"].process is Role.WEIGHT_SERVER
    send(link, worker_ipc.AuditQuery("q"))
    audit = link.wait_for(worker_ipc.AuditReport)
    assert (audit.query_id, audit.idle, audit.findings) == ("q", True, [])
    for kind, expected in (("stacks", "serve"), ("gc", "frozen"), ("torch", "no CUDA context")):
        send(link, worker_ipc.DiagnosticQuery(kind, kind))
        assert expected in link.wait_for(worker_ipc.DiagnosticReport).text

    # A planned restart: the successor is prepared before the old worker stops.
    _, successor = harness.prepared(2)
    assert generate(link, ["a"], 5)["a"] == whole["a"][:5]
    send(link, worker_ipc.Stop())
    stopped = link.wait_for(worker_ipc.StopResult)
    assert (stopped.device_allocated, stopped.device_baseline) == (None, None)
    assert (stopped.handover, stopped.refusal) == (None, None)
    assert stopped.stages_s.keys() >= {"engine", "weights"}
    assert alive(pid), "it stays until it is dismissed"
    link.socket.close()
    assert harness.control.wait_for(Exited) == Exited(1, pid, 0)
    take_over(successor)
    carried = {name: tokens[:23] for name, tokens in whole.items()}
    rest = generate(successor, ["a", "b", "c"], 60, **carried)
    assert {name: carried[name] + rest[name] for name in whole} == whole


NEW = 400
"""Tokens of a request that is handed over: more than a worker makes before it is told to stop."""


def handed_over(link: Link, names: list[str]) -> tuple[bytes, dict[str, list[int]]]:
    """Stop a worker in the middle: what it hands over, and the tokens that it made before."""
    for name in names:
        send(link, Submit(name, [*PROMPT, ord(name[0])], Sampling(max_tokens=NEW)))
    made: dict[str, list[int]] = {name: [] for name in names}
    while min(map(len, made.values())) < 5:
        collect(link.wait_for(worker_ipc.Tokens), made)
    send(link, worker_ipc.Stop(hand_over=True))
    while not isinstance(message := link.next(), worker_ipc.StopResult):
        if isinstance(message, worker_ipc.Tokens):
            collect(message, made)
    assert message.refusal is None
    assert message.handover is not None
    return message.handover, made


def collect(message: worker_ipc.Tokens, made: dict[str, list[int]]) -> None:
    for token in message.tokens:
        made[token.request_id].append(token.token_id)


def goes_on(
    link: Link, handover: bytes, made: dict[str, list[int]]
) -> tuple[worker_ipc.Ready, worker_ipc.AdoptionResult, dict[str, list[int]]]:
    """A successor that takes ``handover``; all tokens of its requests."""
    send(link, worker_ipc.TakeOver(True, handover))
    ready = link.wait_for(worker_ipc.Ready)
    for name, tokens in made.items():
        submit = Submit(name, [*PROMPT, ord(name[0])], Sampling(max_tokens=NEW), list(tokens))
        send(link, submit)
    send(link, worker_ipc.CarryOverComplete("q"))
    found = {name: list(tokens) for name, tokens in made.items()}
    adopted: worker_ipc.AdoptionResult | None = None
    left = set(made)
    while left or adopted is None:
        message = link.next()
        if isinstance(message, worker_ipc.Tokens):
            collect(message, found)
            left -= {token.request_id for token in message.tokens if token.finish_reason}
        elif isinstance(message, worker_ipc.AdoptionResult):
            adopted = message
    send(link, worker_ipc.AuditQuery("q"))
    audit = link.wait_for(worker_ipc.AuditReport)
    assert (audit.idle, audit.findings) == (True, [])
    return ready, adopted, found


def pool_file(server: int) -> Path:
    """The weight server's memory of the KV pool, by its descriptor."""
    return memory_file(server, "plimsoll-kv-pool")


def test_keys_and_values_go_from_worker_to_worker_and_only_as_they_were(
    start: Callable[..., Harness],
) -> None:
    """One worker after another; whatever is wrong with a handover, the texts are the same."""
    harness = start()
    names = ["a", "b", "c"]
    _, link = harness.serving(1)
    others = ["x", "y", "z"]
    whole, whole_of_others = generate(link, names, NEW), generate(link, others, NEW)

    def successor(number: int) -> Link:
        _, following = harness.prepared(number)
        return following

    following = successor(2)
    handover, made = handed_over(link, names)
    ready, adopted, found = goes_on(following, handover, made)
    assert ready.refusal is None
    assert sorted(adopted.request_ids) == names
    assert adopted.refused == {}
    assert found == whole

    # The memory is written to between the two.
    link, following = following, successor(3)
    handover, made = handed_over(link, names)
    with pool_file(harness.weight_server).open("r+b") as memory:
        content = bytearray(memory.read())
        memory.seek(0)
        memory.write(bytes(byte ^ 1 for byte in content))
    ready, adopted, found = goes_on(following, handover, made)
    assert ready.refusal is not None
    assert ready.refusal.outcome is HandoverOutcome.BAD_CONTENTS
    assert adopted.request_ids == []
    assert found == whole

    # The message is damaged on its way.
    link, following = following, successor(4)
    handover, made = handed_over(link, names)
    ready, adopted, found = goes_on(following, handover[:-1] + b"\x00", made)
    assert ready.refusal is not None
    assert ready.refusal.outcome is HandoverOutcome.DAMAGED
    assert (adopted.request_ids, found) == ([], whole)

    # It is an older worker's: the pool is the same, and what is in it is not. The requests must
    # be others: the same ones would have computed the same bytes again.
    link, following = following, successor(5)
    _, made = handed_over(link, others)
    ready, adopted, found = goes_on(following, handover, made)
    assert ready.refusal is not None
    assert ready.refusal.outcome is HandoverOutcome.BAD_CONTENTS
    assert (adopted.request_ids, found) == ([], whole_of_others)

    # Its writer still maps the pool: the weight server says so, whoever passes the message on.
    link, following = following, successor(6)
    handover, made = handed_over(link, names)
    third = successor(7)
    send(third, worker_ipc.TakeOver(True))
    assert third.wait_for(worker_ipc.Ready).refusal is None
    ready, adopted, found = goes_on(following, handover, made)
    assert ready.refusal is not None
    assert ready.refusal.outcome is HandoverOutcome.UNFENCED
    assert (adopted.request_ids, found) == ([], whole)


def test_a_worker_that_hands_over_has_no_way_to_the_pool_any_more(
    start: Callable[..., Harness],
) -> None:
    """Not even where a defect still refers to the tensor: its memory is no part of the process."""
    harness = start(inject="kept_kv")
    pid, link = harness.serving(1)
    maps = Path(f"/proc/{pid}/maps")
    assert "memfd:plimsoll-kv-pool" in maps.read_text()
    handed_over(link, ["a"])
    assert "memfd:plimsoll" not in maps.read_text()
    assert alive(pid)


def test_abort_and_refusal_touch_nobody_else(shared: Harness) -> None:
    _, link = shared.serving(1)
    send(link, Submit("long", PROMPT, Sampling(max_tokens=5_000)))
    link.wait_for(worker_ipc.Tokens)
    send(link, worker_ipc.Abort("long"), worker_ipc.Abort("nobody"))
    send(link, Submit("huge", [5] * 9_000, Sampling(max_tokens=1)))
    dropped = link.wait_for(worker_ipc.RequestFailure)
    assert (dropped.request_id, dropped.reason) == ("huge", "invalid")
    assert "max_model_len" in dropped.message
    assert len(generate(link, ["x"], 5)["x"]) == 5
    send(link, worker_ipc.AuditQuery("q"))
    assert link.wait_for(worker_ipc.AuditReport).findings == []


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model": "/nonexistent"}, "/nonexistent does not exist"),
    ({"max_model_len": 1 << 20}, "--max-model-len must be at most "),
    ({"device": "tpu"}, "device must be auto, cpu or cuda, got 'tpu'"),
    ({"dtype": "int3"}, "dtype must be auto, float32, bfloat16, got 'int3'"),
    ({"inject": "leak"}, "unknown fault 'leak'"),
]
RUN_ALL = """
import sys, msgspec
from plimsoll_engine.worker import main
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
for config in msgspec.json.decode(sys.argv[1], type=list[WorkerConfig]):
    assert main.run(config, 1) == 1
"""


def test_a_worker_that_cannot_start_says_why_and_exits(checkpoint: Path, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="plw-") as folder,
        socket.socket(socket.AF_UNIX) as server,
    ):
        path = f"{folder}/worker.sock"
        server.bind(path)
        server.listen()
        server.settimeout(WAIT_S)
        base: dict[str, Any] = {"model": str(checkpoint), "run_dir": folder, "socket": path}
        configs = [WorkerConfig(**(base | {"device": "cpu"} | bad)) for bad, _ in BAD_CONFIGS]
        body = msgspec.json.encode(configs).decode()
        process = subprocess.Popen([sys.executable, "-c", RUN_ALL, body])
        for _, message in BAD_CONFIGS:
            connection, _ = server.accept()
            with connection:
                link = Link(connection, worker_ipc.from_worker_decoder.decode)
                while not isinstance(failed := link.next(), worker_ipc.WorkerFailure):
                    if isinstance(failed, worker_ipc.Prepared):
                        send(link, worker_ipc.TakeOver())
                assert message in failed.message
                assert failed.permanent
                with pytest.raises(EOFError):
                    link.next()
        assert process.wait(WAIT_S) == 0


def test_killed_workers_are_reaped_and_forked_again(shared: Harness) -> None:
    harness = shared
    for epoch in (1, 2):
        pid, _ = harness.serving(epoch)
        os.kill(pid, signal.SIGKILL)
        assert harness.control.wait_for(Exited) == Exited(epoch, pid, -signal.SIGKILL)
        assert not make_stacks_path(harness.run_dir, "worker", pid).exists()
    assert not alive(pid)


def test_a_zygote_that_nobody_waits_for_ends_quietly(checkpoint: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        config = msgspec.json.encode(WorkerConfig(str(checkpoint), "", "", device="cpu")).decode()
        command = [sys.executable, "-m", "plimsoll_engine.worker.zygote", "--config", config]
        command += ["--control-fd", str(theirs.fileno())]
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=WAIT_S
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_no_worker_outlives_a_killed_zygote(start: Callable[..., Harness]) -> None:
    harness = start()
    pid, link = harness.serving(1)
    harness.process.send_signal(signal.SIGKILL)
    harness.expected_status = -signal.SIGKILL
    with pytest.raises((EOFError, ConnectionError)):
        link.wait_for(worker_ipc.StopResult, 10.0)
    assert eventually(lambda: not alive(pid))


def test_a_worker_without_its_frontend_exits(shared: Harness) -> None:
    pid, link = shared.serving(1)
    link.socket.close()
    assert shared.exit_of(pid) == Exited(1, pid, 1)


def test_a_successor_inherits_its_imports(shared: Harness) -> None:
    before = shared.imports()
    assert "torch.nn" in before
    _, link = shared.serving(7)
    generate(link, ["a"], 2)
    assert shared.imports() == before, "the worker imported nothing"


def reports_after(link: Link, count: int) -> worker_ipc.Report:
    """A report that was written after ``count`` requests had ended."""
    while True:
        report = link.wait_for(worker_ipc.Report)
        if report.load.requests_total == count and report.load.running == 0:
            return report


def in_use(report: worker_ipc.Report) -> int:
    assert report.memory.malloc_in_use is not None
    assert report.memory.python_objects is not None
    return report.memory.malloc_in_use + report.memory.python_objects


MIB = 1 << 20


@pytest.mark.parametrize(
    ("freeze_every", "cured", "broken"),
    [
        (1, False, {"released_requests_die", "nothing_is_frozen_again"}),
        (0, True, {"released_requests_die"}),
    ],
    ids=["frozen", "collectable"],
)
def test_the_request_cycle_grows_and_a_trim_cures_it_unless_frozen(
    start: Callable[..., Harness], freeze_every: int, cured: bool, broken: set[str]
) -> None:
    inject = f"request_cycle:payload_bytes=4Mi,freeze_every={freeze_every}"
    harness = start(inject=inject)
    _, link = harness.serving(1)
    generate(link, ["warm"], 2)
    before = reports_after(link, 1)
    assert before.injections == ["request_cycle"]
    names = [f"r{i}" for i in range(12)]
    generate(link, names, 2)
    grown = in_use(reports_after(link, 13)) - in_use(before)
    assert grown >= 12 * 4 * MIB
    send(link, worker_ipc.AuditQuery("q"))
    assert {f.rule for f in link.wait_for(worker_ipc.AuditReport).findings} == broken
    send(link, worker_ipc.Trim("t"))
    steps = {step.name: step for step in link.wait_for(worker_ipc.TrimResult).steps}
    left = in_use(reports_after(link, 13)) - in_use(before)
    assert (left < 4 * MIB) == cured
    collect = steps["gc_collect"]
    assert collect.before_bytes is not None
    assert collect.after_bytes is not None
    assert (collect.before_bytes - collect.after_bytes >= 12 * 4 * MIB) == cured

    _, healthy = harness.serving(2)  # epochs=first: a restart heals
    generate(healthy, names, 2)
    assert reports_after(healthy, 12).injections == []


GROWTHS = {
    "append_list": "append_list:bytes_per_request=4Mi,epochs=all",
    "mmap_growth": "mmap_growth:bytes_per_request=2Mi,bytes_per_s=16Mi",
    "device_dict": "device_dict:bytes_per_request=8Mi",
}


def test_each_growth_is_resident(start: Callable[..., Harness]) -> None:
    harness = start(inject=";".join(GROWTHS.values()))
    pid, link = harness.serving(1)

    def resident() -> int:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    generate(link, ["warm"], 2)
    assert reports_after(link, 1).injections == list(GROWTHS)
    before = resident()
    generate(link, [f"r{i}" for i in range(10)], 2)
    reports_after(link, 11)
    by_request = resident() - before
    assert by_request >= 10 * (4 + 2 + 8) * MIB * 0.9  # malloc may use what it had retained
    assert eventually(lambda: resident() - before >= by_request + 16 * MIB), "mmap with time"

    pid, link = harness.serving(2)  # only the list is in all epochs
    generate(link, ["warm"], 2)
    reports_after(link, 1)
    before = resident()
    generate(link, [f"r{i}" for i in range(10)], 2)
    assert reports_after(link, 11).injections == ["append_list"]
    assert 10 * 3 * MIB <= resident() - before <= 10 * 6 * MIB


def test_the_eviction_loop_hangs_the_worker_and_its_stacks_can_still_be_had(
    start: Callable[..., Harness],
) -> None:
    harness = start(inject="eviction_loop:after_requests=2")
    pid, link = harness.serving(1)
    generate(link, ["a", "b"], 3)
    send(link, Submit("c", PROMPT, Sampling(max_tokens=3)))
    with pytest.raises(TimeoutError):
        link.wait_for(
            worker_ipc.StopResult, 3.0
        )  # never sent: all that comes in between is dropped
    assert not link.inbox
    os.kill(pid, signal.SIGUSR1)
    path = make_stacks_path(harness.run_dir, "worker", pid)
    assert eventually(lambda: "evict" in path.read_text())
    os.kill(pid, signal.SIGKILL)
    assert harness.control.wait_for(Exited).status == -signal.SIGKILL
    _, successor = harness.serving(2)
    assert len(generate(successor, ["a", "b", "c", "d"], 3)) == 4


def memory_file(server: int, name: str) -> Path:
    """Shared memory of the weight server, by its descriptor."""
    for link in Path(f"/proc/{server}/fd").iterdir():
        if os.readlink(link).startswith(f"/memfd:{name}"):
            return link
    raise AssertionError(f"the weight server has no {name}")


def weights_file(server: int) -> Path:
    return memory_file(server, "plimsoll-weights")


def test_weights_that_a_crashed_worker_damaged_are_loaded_again(shared: Harness) -> None:
    pid, link = shared.serving(1)
    expected = generate(link, ["a"], 10)
    before = os.stat(weights_file(shared.weight_server)).st_ino
    os.kill(pid, signal.SIGKILL)
    shared.exit_of(pid)

    pid, link = shared.serving(2)
    assert os.stat(weights_file(shared.weight_server)).st_ino == before, "sound weights stay"
    with weights_file(shared.weight_server).open("r+b") as memory:
        memory.seek(64 << 10)
        memory.write(b"\x7f" * 4096)
    os.kill(pid, signal.SIGKILL)
    shared.exit_of(pid)

    _, link = shared.serving(3)
    assert os.stat(weights_file(shared.weight_server)).st_ino != before
    assert generate(link, ["a"], 10) == expected


def test_a_standby_takes_over_from_a_crashed_worker_unless_that_one_damaged_the_weights(
    shared: Harness,
) -> None:
    """It has mapped them before the crash, and asks about them when it claims the KV pool."""
    pid, link = shared.serving(1)
    expected = generate(link, ["a"], 10)
    standby, link = shared.prepared(2)
    os.kill(pid, signal.SIGKILL)
    shared.exit_of(pid)
    send(link, worker_ipc.TakeOver(quick=True))
    link.wait_for(worker_ipc.Ready)
    assert generate(link, ["a"], 10) == expected

    second, link = shared.prepared(3)
    with weights_file(shared.weight_server).open("r+b") as memory:
        memory.seek(64 << 10)
        memory.write(b"\x7f" * 4096)
    os.kill(standby, signal.SIGKILL)
    shared.exit_of(standby)
    send(link, worker_ipc.TakeOver(quick=True))
    failed = link.wait_for(worker_ipc.WorkerFailure)
    assert "a crashed worker has changed" in failed.message
    assert not failed.permanent
    shared.exit_of(second)

    _, link = shared.serving(4)
    assert generate(link, ["a"], 10) == expected, "they are loaded again"


def test_a_weight_server_ends_only_when_its_last_worker_has(start: Callable[..., Harness]) -> None:
    harness = start()
    pid, link = harness.serving(1)
    os.kill(harness.weight_server, signal.SIGTERM)
    assert len(generate(link, ["a"], 10)["a"]) == 10
    assert alive(harness.weight_server)
    send(link, worker_ipc.Stop())
    link.wait_for(worker_ipc.StopResult)
    link.socket.close()
    ended = [harness.control.wait_for(Exited), harness.control.wait_for(Exited)]
    ended.sort(key=lambda one: one.role)  # the mapping is returned before the worker is reaped
    assert ended == [Exited(1, harness.weight_server, 0, Role.WEIGHT_SERVER), Exited(1, pid, 0)]

    harness.fork_weight_server(2)
    _, link = harness.serving(2)
    assert len(generate(link, ["a"], 10)["a"]) == 10


def test_a_successor_that_is_not_wanted_goes(shared: Harness) -> None:
    pid, link = shared.prepared(1)
    send(link, worker_ipc.Stop())
    assert isinstance(link.next(), worker_ipc.StopResult)
    link.socket.close()
    assert shared.exit_of(pid) == Exited(1, pid, 0)
