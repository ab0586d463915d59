"""Engines forked off a process that has imported what they import: 3 of the 3.6 s of CPU that each
start takes, and the tests start some hundred.

Only the imports are shared, and workers compute with one thread. A frontend forks its first
zygote and its first preparer before it does anything else, while it has one thread; they wait for
the orders that would start them. All that comes later (weight servers, workers, the next zygote)
begins as it always does. What tests the start or the process itself starts its engine afresh.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from plimsoll_engine.api import preparer, preparer_process
from plimsoll_engine.frontend.workers.zygote_client import SINGLE_THREAD_ENVIRONMENT
from plimsoll_engine.process.parent_death import die_with_parent

MODULE = "tests.integration.engine.warm"
ENGINE, ZYGOTE = "plimsoll_engine", "plimsoll_engine.worker.zygote"
ROOT = Path(__file__).parents[3]
ORDER_BYTES = 1 << 17
NUMBER = struct.Struct("i")
START_TIMEOUT_S = 120.0
"""For the imports of a template, on a machine that runs other tests beside it."""
ASIDE = 500
"""Descriptors from here on are in nobody's way."""


class WarmProcess:
    """``python -m program arguments``, its output in ``log``; as ``subprocess.Popen``.

    ``program`` is an engine, or a zygote that inherits the descriptors ``pass_fds``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        program: str = ENGINE,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._arguments = list(arguments)
        self._told, theirs = socket.socketpair()
        order = {
            "program": program, "arguments": self._arguments, "log": str(log),
            "environment": dict(environment), "inherited": list(pass_fds),
        }  # fmt: skip
        with theirs:
            fds = [theirs.fileno(), *pass_fds]
            socket.send_fds(_template(), [json.dumps(order).encode()], fds)
        self.pid = self._next(START_TIMEOUT_S)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status; subprocess.TimeoutExpired where it runs on after ``timeout`` seconds."""
        if self.returncode is None:
            self.returncode = self._next(timeout)
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to it; nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM to it."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it."""
        self.send_signal(signal.SIGKILL)

    def _next(self, timeout_s: float) -> int:
        """What the template tells next: first the process id, then the exit status."""
        if not select.select([self._told], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self._arguments, timeout_s)
        told = self._told.recv(NUMBER.size)
        assert told, "the template of the tests' engines has ended"
        number: int = NUMBER.unpack(told)[0]
        return number


@functools.cache
def _template() -> socket.socket:
    """Where this test process's template takes orders; it ends when the tests do."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | SINGLE_THREAD_ENVIRONMENT,
            cwd=ROOT,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


class Template:
    """Forks an engine for each order and tells of its end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._told: dict[int, socket.socket] = {}
        """Whom to tell of the end of each engine, by its pidfd."""

    def serve(self) -> None:
        """Until the tests are gone, and then its engines with it."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd in self._told:
                    poll.unregister(fd)
                    self._reap(fd)
                    continue
                order, fds, _, _ = socket.recv_fds(self._control, ORDER_BYTES, 3)
                if not order:
                    return
                told = socket.socket(fileno=fds[0])
                poll.register(self._fork(json.loads(order), told, fds[1:]))

    def _fork(self, order: dict[str, Any], told: socket.socket, fds: list[int]) -> int:
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            for fd, other in self._told.items():
                os.close(fd)
                other.close()
            told.close()
            die_with_parent(template)
            _write_to(order.pop("log"))
            if order.pop("program") == ZYGOTE:
                _zygote(order, fds)
            _engine(order)
        for inherited in fds:
            os.close(inherited)
        told.sendall(NUMBER.pack(pid))
        fd = os.pidfd_open(pid)
        self._told[fd] = told
        return fd

    def _reap(self, fd: int) -> None:
        ended = os.waitid(os.P_PIDFD, fd, os.WEXITED)
        assert ended is not None
        os.close(fd)
        exited = ended.si_code == os.CLD_EXITED
        with self._told.pop(fd) as told, contextlib.suppress(OSError):
            told.sendall(NUMBER.pack(ended.si_status if exited else -ended.si_status))


def _write_to(log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)


def _engine(order: dict[str, Any]) -> NoReturn:
    """Become what ``python -m plimsoll_engine`` is."""
    from plimsoll_engine.__main__ import main

    os.environ.clear()
    os.environ.update(order["environment"])
    _bear_zygote()
    _bear_preparer()
    status = 1
    try:
        status = main(order["arguments"])
    except SystemExit as end:  # argparse
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _end(status)


def _end(status: int) -> NoReturn:
    """End as Python does, but leave torch as it is: to take it apart takes a second of CPU."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _bear(become: Callable[[dict[str, Any], list[int]], NoReturn]) -> tuple[int, socket.socket]:
    """Fork a child that waits for the order to be one of this engine's processes."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    frontend = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        die_with_parent(frontend)
        order, fds, _, _ = socket.recv_fds(theirs, ORDER_BYTES, 2)
        theirs.close()
        if not order:
            os._exit(0)  # the engine ended before it started one
        become(json.loads(order), fds)
    theirs.close()
    return pid, ours


def _bear_preparer() -> None:
    """Fork the process that prepares bodies, which the engine will start first."""
    pid, ours = _bear(_preparer)

    def start_or_wake(command: list[str], pass_fds: Sequence[int]) -> Any:
        vars(preparer)["subprocess"] = subprocess
        environment = dict(os.environ)
        order = {"arguments": command[3:], "environment": environment, "inherited": pass_fds}
        with ours:
            socket.send_fds(ours, [json.dumps(order).encode()], pass_fds)
        return WokenPreparer(pid)

    vars(preparer)["subprocess"] = SimpleNamespace(Popen=start_or_wake)


class WokenPreparer:
    """The first preparer, as ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    def poll(self) -> int | None:
        """0 once it has ended."""
        self._reap(os.WNOHANG)
        return 0 if self._ended else None

    def wait(self) -> None:
        """Until it has ended."""
        self._reap(0)

    def kill(self) -> None:
        """Send SIGKILL to it; nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> None:
        if not self._ended:
            try:
                self._ended = os.waitpid(self.pid, options)[0] == self.pid
            except ChildProcessError:  # the frontend has reaped it with strangers
                self._ended = True


def _bear_zygote() -> None:
    """Fork the zygote that :class:`ZygoteClient` will start first."""
    pid, ours = _bear(_zygote)
    start = asyncio.create_subprocess_exec

    async def start_or_wake(program: str, *arguments: str, **options: Any) -> Any:
        if arguments[:2] != ("-m", ZYGOTE):
            return await start(program, *arguments, **options)
        asyncio.create_subprocess_exec = start
        order = {"arguments": arguments[2:], "environment": dict(options["env"])}
        order["inherited"] = options["pass_fds"]
        with ours:
            socket.send_fds(ours, [json.dumps(order).encode()], options["pass_fds"])
        return Woken(pid)

    asyncio.create_subprocess_exec = start_or_wake  # type: ignore[assignment]


class Woken:
    """The zygote, as ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    async def wait(self) -> None:
        """Until it is gone."""
        await self._ended.wait()

    def kill(self) -> None:
        """Send SIGKILL to it."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        with contextlib.suppress(ChildProcessError):  # the frontend has reaped it with strangers
            os.waitpid(self.pid, 0)
        os.close(self._pidfd)
        self._ended.set()


def _zygote(order: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become what ``python -m plimsoll_engine.worker.zygote`` is."""
    from plimsoll_engine.worker import zygote

    _inherit(order, fds)
    zygote.main()
    os._exit(0)


def _preparer(order: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become what ``python -m plimsoll_engine.api.preparer_process`` is."""
    _inherit(order, fds)
    preparer_process.main()
    os._exit(0)


def _inherit(order: dict[str, Any], fds: list[int]) -> None:
    """Take the descriptors, the environment and the arguments of an order."""
    # The numbers are in the arguments. First aside: one's number may be what another has now.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, ASIDE) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(aside, order["inherited"], strict=True):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv[1:] = order["arguments"]


def _compute_with_one_thread() -> None:
    """For workers: a second thread of a model this small mostly waits, and burns its core there."""
    from plimsoll_engine.worker import follower
    from plimsoll_engine.worker import main as worker

    for module in (worker, follower):
        vars(module)["count_cores_per_process"] = lambda num_processes=1: 1


def main() -> None:
    """Import, then fork an engine for each order until the tests are gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    from transformers.utils import chat_template_utils  # noqa: F401 - of chats, where one comes

    from plimsoll_engine import server  # noqa: F401 - the frontend's imports
    from plimsoll_engine.process.threads import list_threads
    from plimsoll_engine.worker import zygote

    os.environ.update(dict.fromkeys(zygote.THREAD_COUNT_VARIABLES, "1"))
    for name in zygote.PRELOADED_MODULES:
        importlib.import_module(name)
    for name in zygote.OPTIONAL_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _compute_with_one_thread()
    others = set(list_threads()[1:]) - zygote.FORK_SAFE_THREADS
    assert not others, f"a fork copies one thread; the imports have started {others}"
    gc.collect()
    gc.freeze()
    Template(control).serve()
    _end(0)


if __name__ == "__main__":
    main()
