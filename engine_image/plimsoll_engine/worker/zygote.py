"""The zygote: torch and the model code imported, no CUDA context, one thread; the weight holder
and the workers fork off it.

Started by the frontend as ``python -m plimsoll_engine.worker.zygote --control-fd FD --config JSON``
(:mod:`plimsoll_engine.zygote_ipc`). A fork copies one thread only, so a lock that another thread
held would stay locked in the child for ever, and an OpenMP pool would be gone while its library
waits for it. Hence: thread counts are set before numpy and torch load, no tensor operation is run
here, ``torch.cuda.is_available()`` is never asked, and the number of threads is checked before each
fork.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import NoReturn

import msgspec

from plimsoll_api.admin import Role
from plimsoll_engine import zygote_ipc
from plimsoll_engine.core.grammar import Vocabulary
from plimsoll_engine.process_rules import frozen
from plimsoll_engine.worker.framing import FrameReader
from plimsoll_engine.worker.process import die_with_parent, threads
from plimsoll_engine.zygote_ipc import Exited, Fork, Forked, ForkFailed, WorkerConfig, ZygoteReady

SINGLE_THREADED = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
IMPORTS = (
    "torch",
    "safetensors.torch",
    "plimsoll_engine.weights.holder",
    "plimsoll_engine.worker.main",
    "plimsoll_engine.worker.follower",
)
OPTIONAL_IMPORTS = ("triton",)
"""Published for Linux on x86-64 only."""

FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""jemalloc, which some libraries bring along, stops its thread around a fork (pthread_atfork)."""


class Zygote:
    """Forks on demand and reaps."""

    def __init__(self, control: socket.socket, config: WorkerConfig) -> None:
        self.control = control
        self.config = config
        self.vocabulary = Vocabulary.load(Path(config.model))
        self.reader = FrameReader()
        self.children: dict[int, Forked] = {}
        """By pidfd."""
        # Bound here, not in a holder: a worker may connect before there is a holder, and no worker
        # can meet the socket of a holder that is gone.
        self.weights: socket.socket | None = listen(config.weights) if config.weights else None

    def serve(self) -> None:
        """Until the frontend is gone; then no worker is left."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd in self.children:
                        poll.unregister(fd)
                        self._reap(fd)
                    elif not self._read_control(poll):
                        return
        except OSError as error:
            # The frontend went while it was written to.
            print(f"zygote: control socket: {error}", file=sys.stderr)
        finally:
            self._kill_children()

    def _read_control(self, poll: select.poll) -> bool:
        data = self.control.recv(65536)
        for body in self.reader.feed(data):
            message = zygote_ipc.to_zygote.decode(body)
            fd = self._fork(message)
            if fd is not None:
                poll.register(fd, select.POLLIN)
        return bool(data)

    def send(self, message: zygote_ipc.FromZygote) -> None:
        self.control.sendall(zygote_ipc.frame(message))

    def _fork(self, message: Fork) -> int | None:
        others = [name for name in threads()[1:] if name not in FORK_SAFE_THREADS]
        if others:
            why = f"the zygote has more than one thread ({', '.join(others)}); a fork copies one"
            self.send(ForkFailed(message.number, why, message.role))
            return None
        zygote = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            self.send(ForkFailed(message.number, f"fork: {error}", message.role))
            return None
        if pid == 0:
            self._become(message, zygote)
        fd = os.pidfd_open(pid)
        self.children[fd] = Forked(message.number, pid, message.role, message.rank)
        self.send(self.children[fd])
        return fd

    def _become(self, message: Fork, zygote: int) -> NoReturn:
        """The child's whole life; it never returns into the zygote's code."""
        status = 1
        try:
            die_with_parent(zygote)
            self.control.close()
            for fd in self.children:
                os.close(fd)
            status = self._run(message)
        except BaseException:  # noqa: BLE001 - a child must never run its parent's code
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _run(self, message: Fork) -> int:
        from plimsoll_engine.weights import holder
        from plimsoll_engine.worker import follower, main

        if message.role is Role.HOLDER:
            assert self.weights is not None
            return holder.run(self.config, self.weights)
        if self.weights is not None:
            self.weights.close()
        if message.rank:
            return follower.run(self.config, message.number, message.rank)
        return main.run(self.config, message.number, self.vocabulary)

    def _reap(self, fd: int) -> None:
        child = self.children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self.send(Exited(child.number, child.pid, code, child.role, child.rank))

    def _kill_children(self) -> None:
        """Workers before the holder: what it lends is not freed under them."""
        for fd in sorted(self.children, key=lambda fd: self.children[fd].role is Role.HOLDER):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.waitpid(self.children[fd].pid, 0)
            os.close(fd)
        self.children.clear()


def listen(path: str) -> socket.socket:
    """The weight holder's socket; a file that a killed predecessor left is taken over."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    Path(path).unlink(missing_ok=True)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen()
    return listener


def import_everything(model: Path, device: str) -> None:
    """What every worker of ``model`` on ``device`` needs, once. The libraries read their thread
    counts when they load."""
    os.environ.update(dict.fromkeys(SINGLE_THREADED, "1"))
    for name in IMPORTS:
        importlib.import_module(name)
    for name in OPTIONAL_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from plimsoll_engine.kernels import preload
    from plimsoll_engine.models import loader

    loader.import_code(model)
    if preload.wanted(device):
        preload.preload()


def main() -> None:
    parser = argparse.ArgumentParser(prog="plimsoll_engine.worker.zygote")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--config", required=True, help="a WorkerConfig in JSON")
    arguments = parser.parse_args()
    die_with_parent(os.getppid())
    # The terminal's Ctrl-C goes to the whole group; the frontend decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(arguments.config, type=WorkerConfig)
    control = socket.socket(fileno=arguments.control_fd)
    begun = time.monotonic()
    import_everything(Path(config.model), config.device)
    zygote = Zygote(control, config)
    # Python warns of any second thread; ours are checked by name before each fork.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    # Objects of before the fork are nobody's garbage: a collection in a worker need not look at
    # them, and so does not copy their pages.
    frozen.before_forks()
    zygote.send(ZygoteReady(os.getpid(), time.monotonic() - begun))
    zygote.serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the libraries' own clean-up takes longer than all else and prints of itself


if __name__ == "__main__":
    main()
