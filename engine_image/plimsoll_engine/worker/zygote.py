"""Zygote: a process that has imported torch and the model code, and forks workers.

It has one thread and no CUDA context, because a fork copies only one thread. It therefore runs no
tensor operation and never calls ``torch.cuda.is_available()``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
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

from plimsoll_api import logs
from plimsoll_api.admin import Role
from plimsoll_engine import injection
from plimsoll_engine.core.grammar.grammars import Vocabulary
from plimsoll_engine.messages import zygote_ipc
from plimsoll_engine.messages.framing import FrameReader
from plimsoll_engine.messages.zygote_ipc import (
    Exited,
    Fork,
    Forked,
    ForkFailed,
    WorkerConfig,
    ZygoteReady,
)
from plimsoll_engine.process import stacks
from plimsoll_engine.process.parent_death import die_with_parent, outlive_parent, outlive_zygote
from plimsoll_engine.process.rules import freeze_counter
from plimsoll_engine.process.threads import list_threads

log = logging.getLogger(__name__)

THREAD_COUNT_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
# In entries of up to 0.3 MB. The default is 1,024 entries.
ONEDNN_CACHE_CAPACITY = "128"
PRELOADED_MODULES = (
    "torch",
    "safetensors.torch",
    "plimsoll_engine.weights.weight_server",
    "plimsoll_engine.worker.main",
    "plimsoll_engine.worker.follower",
)
# Published only for Linux on x86-64.
OPTIONAL_MODULES = ("triton",)

# Threads that may exist during a fork. jemalloc, which some libraries include, stops its thread
# around a fork (pthread_atfork).
FORK_SAFE_THREADS = {"jemalloc_bg_thd"}


class Zygote:
    """Server that forks processes on request, and reaps them."""

    def __init__(
        self, control: socket.socket, config: WorkerConfig, weights: socket.socket | None
    ) -> None:
        self.control = control
        self.config = config
        self.vocabulary = Vocabulary.load(Path(config.model))
        self.reader = FrameReader()
        self.children: dict[int, Forked] = {}
        self.frontend = os.getppid()
        # Listening socket of the weight server, which workers can connect to before the server
        # runs.
        self.weights = weights

    def serve(self) -> None:
        """Serve until the frontend has exited, then kill the remaining children."""
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
            # The frontend exited during a write.
            log.error("cannot read the frontend's control socket: %s", error)
        finally:
            self._kill_children()

    def _read_control(self, poll: select.poll) -> bool:
        data = self.control.recv(65536)
        for body in self.reader.feed(data):
            message = zygote_ipc.to_zygote_decoder.decode(body)
            fd = self._fork(message)
            if fd is not None:
                poll.register(fd, select.POLLIN)
        return bool(data)

    def send(self, message: zygote_ipc.FromZygote) -> None:
        """Send a message to the frontend. Raises OSError if it has exited."""
        self.control.sendall(zygote_ipc.encode_frame(message))

    def _fork(self, message: Fork) -> int | None:
        others = [name for name in list_threads()[1:] if name not in FORK_SAFE_THREADS]
        if others:
            why = f"cannot fork: the zygote has several threads ({', '.join(others)})"
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
            self._run_child(message, zygote)
        fd = os.pidfd_open(pid)
        self.children[fd] = Forked(message.number, pid, message.role, message.rank)
        self.send(self.children[fd])
        return fd

    def _run_child(self, message: Fork, zygote: int) -> NoReturn:
        status = 1
        try:
            outlive_zygote(zygote, self.frontend)
            self.control.close()
            for fd in self.children:
                os.close(fd)
            status = self._run_role(message)
        except BaseException:
            log.exception(
                "the forked process failed and is exiting",
                extra={"role": message.role, "number": message.number, "rank": message.rank},
            )
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _run_role(self, message: Fork) -> int:
        from plimsoll_engine.weights import weight_server
        from plimsoll_engine.worker import follower, main

        if message.role is Role.WEIGHT_SERVER:
            assert self.weights is not None
            return weight_server.run_weight_server(self.config, self.weights)
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
        stacks.remove_stale_stacks(self.config.run_dir)
        self.send(Exited(child.number, child.pid, code, child.role, child.rank))

    def _kill_children(self) -> None:
        # The workers use the memory of the weight server, so they end first.
        for fd in sorted(
            self.children, key=lambda fd: self.children[fd].role == Role.WEIGHT_SERVER
        ):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.waitpid(self.children[fd].pid, 0)
            os.close(fd)
        self.children.clear()
        stacks.remove_stale_stacks(self.config.run_dir)


def import_everything(model: Path, device: str) -> None:
    """Import all modules that workers of ``model`` on ``device`` need."""
    # numpy and torch would start threads, whose locks would stay locked in a forked child.
    os.environ.update(dict.fromkeys(THREAD_COUNT_VARIABLES, "1"))
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_CACHE_CAPACITY)
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    for name in OPTIONAL_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from plimsoll_engine.kernels import preload
    from plimsoll_engine.models import loader

    os.environ.setdefault("TRITON_CACHE_MANAGER", preload.CACHE_MANAGER)
    loader.import_model_code(model)
    if preload.can_run_cuda(device):
        preload.preload_kernels()


def main() -> None:
    """Import what workers need, then fork on request until the frontend has exited."""
    parser = argparse.ArgumentParser(prog="plimsoll_engine.worker.zygote")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument(
        "--weights-fd", type=int, help="listening socket at the path WorkerConfig.weights"
    )
    parser.add_argument("--config", required=True, help="WorkerConfig as JSON")
    arguments = parser.parse_args()
    logs.configure_logging()
    die_with_parent(os.getppid())
    # Ctrl-C reaches the whole process group, but the frontend decides when workers exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(arguments.config, type=WorkerConfig)
    control = socket.socket(fileno=arguments.control_fd)
    begun = time.monotonic()
    import_everything(Path(config.model), config.device)
    if config.inject:
        injection.load_entry_point("worker")
    weights = None if arguments.weights_fd is None else socket.socket(fileno=arguments.weights_fd)
    zygote = Zygote(control, config, weights)
    # Python warns about any second thread; _fork checks threads by name instead.
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    # Freeze the objects that exist before a fork: a collection in a worker skips them, and so does
    # not copy their pages.
    freeze_counter.freeze_before_forks()
    # From here on, a closed control socket means that the frontend has exited, and the zygote kills
    # its children. The parent-death signal would kill only the zygote.
    outlive_parent()
    if os.getppid() != zygote.frontend:
        os._exit(1)
    try:
        zygote.send(ZygoteReady(os.getpid(), time.monotonic() - begun))
    except BrokenPipeError:
        os._exit(1)  # the frontend timed out and has logged it
    zygote.serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the libraries' slow clean-up and its output


if __name__ == "__main__":
    main()
