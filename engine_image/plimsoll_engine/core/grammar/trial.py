"""Try to compile new grammars in a process with limits of CPU time and memory.

llguidance does not limit the time: 64 KiB of text can take minutes. At its start, while it has one
thread and no CUDA context, the worker forks a server, which forks a process for each trial.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from plimsoll_engine.errors import GrammarServerLostError
from plimsoll_engine.messages.worker_ipc import Grammar
from plimsoll_engine.process.parent_death import die_with_parent

# A schema of 60 KB with 2,000 properties takes 0.5 s (2 cores, vocabulary of 150,000 tokens).
MAX_TRIAL_CPU_S = 2
# Ends trials on an overloaded machine.
TRIAL_TIMEOUT_S = 20.0
# Memory that a trial does not share with the worker. At most 57 MiB were measured.
MAX_TRIAL_BYTES = 256 << 20
# The compiler recurses for each link in a chain of rules, and a stack overflow ends the process. A
# chain of 8,000 rules (64 KiB of text) needs between 8 and 32 MiB. Only the used part of the stack
# takes memory.
COMPILER_STACK_BYTES = 256 << 20
# Streams get the CPU first.
TRIAL_NICENESS = 10

TRIAL_ENDED_MESSAGE = (
    "the process that compiled the grammar was killed, probably for lack of memory: send the"
    " request again"
)
OVER_LIMITS_MESSAGE = (
    f"compiling the grammar takes more than {MAX_TRIAL_CPU_S} s of CPU time or"
    f" {MAX_TRIAL_BYTES >> 20} MiB: make the grammar smaller or less ambiguous"
)


class TrialFailedError(Exception):
    """The trial has no result: its process did not start, got no CPU time, or was killed."""


class TrialPassed(msgspec.Struct, tag="passed"):
    """Result of a successful trial."""

    bytes: int  # memory of the compiled grammar


class GrammarRefused(msgspec.Struct, tag="refused"):
    """Result of a trial that refused the grammar."""

    message: str
    permanent: bool = False  # whether the grammar will always be refused


class _TrialStarted(msgspec.Struct, tag="begun"):
    pid: int
    resident: int


class _TrialDied(msgspec.Struct, tag="died"):
    # ``code`` is the exit code, or the negative number of the signal that killed the process.
    code: int


CompileTrial = Callable[[Grammar], TrialPassed | GrammarRefused]

_message_decoder = msgspec.msgpack.Decoder(
    _TrialStarted | TrialPassed | GrammarRefused | _TrialDied
)
_grammar_decoder = msgspec.msgpack.Decoder(Grammar)


class Trial:
    """Trial of one grammar. A thread runs it, and other threads may cancel it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pidfd: int | None = None
        self._pid = 0
        self._resident = 0
        self._cancelled = False

    @property
    def bytes(self) -> int:
        """Memory in bytes that the trial's process does not share with the worker."""
        return max(0, _read_resident_bytes(self._pid) - self._resident) if self._pid else 0

    def cancel(self) -> None:
        """Kill the trial's process now, or as soon as it starts."""
        with self._lock:
            self._cancelled = True
            self._kill()

    def run(self, server: TrialServer, grammar: Grammar) -> TrialPassed | GrammarRefused:
        """Compile ``grammar`` in a new process, and return the result.

        Raises TrialFailedError if there is no result, and GrammarServerLostError if ``server`` has
        exited.
        """
        with server.connect() as connection:
            try:
                return self._run_in_process(connection, grammar)
            except TimeoutError:
                # The process exits after MAX_TRIAL_CPU_S, so the machine had no CPU time for it.
                raise TrialFailedError(
                    f"the machine is too busy to compile the grammar within {TRIAL_TIMEOUT_S:g} s:"
                    " send the request again"
                ) from None
            except OSError as error:  # the process ended before it had the whole grammar
                raise TrialFailedError(f"{TRIAL_ENDED_MESSAGE}: {error}") from None
            finally:
                self._kill_and_forget()

    def _run_in_process(
        self, connection: socket.socket, grammar: Grammar
    ) -> TrialPassed | GrammarRefused:
        connection.settimeout(TRIAL_TIMEOUT_S)
        if not (first := connection.recv(1 << 10)):
            raise TrialFailedError(
                "no process is available to compile the grammar: send the request again"
            )
        if not isinstance(begun := _message_decoder.decode(first), _TrialStarted):
            raise TrialFailedError(TRIAL_ENDED_MESSAGE)
        with self._lock:
            # The process waits for the grammar, so its PID cannot have been reused.
            self._pidfd = os.pidfd_open(begun.pid)
            self._pid, self._resident = begun.pid, begun.resident
            if self._cancelled:
                raise TrialFailedError("the request ended before its grammar was compiled")
        connection.sendall(msgspec.msgpack.encode(grammar))
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(1 << 16)
        verdict = _message_decoder.decode(answer) if answer else _TrialDied(0)
        if isinstance(verdict, TrialPassed | GrammarRefused):
            return verdict
        # A process that exceeds its limits ends by SIGXCPU, SIGABRT or SIGSEGV. The kernel sends
        # SIGKILL if memory is short. A server that has ended reports nothing.
        if isinstance(verdict, _TrialDied) and verdict.code < 0 and verdict.code != -signal.SIGKILL:
            return GrammarRefused(OVER_LIMITS_MESSAGE)
        raise TrialFailedError(TRIAL_ENDED_MESSAGE)

    def _kill_and_forget(self) -> None:
        with self._lock:
            self._kill()
            if self._pidfd is not None:
                os.close(self._pidfd)
            self._pidfd, self._pid = None, 0

    def _kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class TrialServer:
    """Connection of the worker to the server that forks the processes of trials."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self._control = control

    @classmethod
    def fork(
        cls, compile_grammar: CompileTrial, close: Callable[[], None] = lambda: None
    ) -> TrialServer:
        """Fork the server, and return the connection to it. This process must have only one thread.

        The server calls ``close`` to release inherited resources.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                ours.close()
                close()
                _serve(theirs, compile_grammar)
            finally:
                os._exit(0)
        theirs.close()
        return cls(pid, ours)

    def connect(self) -> socket.socket:
        """Start the process of a new trial, and return a connection to it.

        Raises GrammarServerLostError.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"T"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise GrammarServerLostError(
                    f"the process that compiles grammars has exited: {error}"
                ) from None
        return ours

    def close(self) -> None:
        """End the server and all trials. Idempotent."""
        if self._control.fileno() < 0:
            return
        self._control.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _serve(control: socket.socket, compile_grammar: CompileTrial) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                poll.unregister(fd)
                os.close(fd)
                child, connection = children.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with connection, contextlib.suppress(OSError):
                    if code:
                        connection.sendall(msgspec.msgpack.encode(_TrialDied(code)))
                continue
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                for pidfd in children:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return
            connection = socket.socket(fileno=fds[0])
            server = os.getpid()
            try:
                pid = os.fork()
            except OSError:
                connection.close()
                continue
            if pid == 0:
                try:
                    die_with_parent(server)
                    control.close()
                    for _, other in children.values():
                        other.close()
                    _compile_and_report(connection, compile_grammar)
                finally:
                    os._exit(1)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid, connection
            poll.register(pidfd, select.POLLIN)


def _compile_and_report(connection: socket.socket, compile_grammar: CompileTrial) -> None:
    _set_limits()
    resident = _read_resident_bytes(os.getpid())
    connection.sendall(msgspec.msgpack.encode(_TrialStarted(os.getpid(), resident)))
    text = bytearray()
    while part := connection.recv(1 << 16):
        text += part
    grammar = _grammar_decoder.decode(text)
    verdicts: list[TrialPassed | GrammarRefused] = []
    done = threading.Event()

    def run_compilation() -> None:
        try:
            verdicts.append(compile_grammar(grammar))
        finally:
            done.set()

    threading.stack_size(COMPILER_STACK_BYTES)
    threading.Thread(target=run_compilation, daemon=True).start()
    while not done.wait(0.05):
        used = _read_resident_bytes(os.getpid()) - resident
        if time.process_time() > MAX_TRIAL_CPU_S or used > MAX_TRIAL_BYTES:
            break
    verdict = (
        verdicts[0]
        if done.is_set() and verdicts
        else GrammarRefused(OVER_LIMITS_MESSAGE, permanent=True)
    )
    connection.sendall(msgspec.msgpack.encode(verdict))
    connection.shutdown(socket.SHUT_WR)  # the server must not send a message after this one
    os._exit(0)


def _set_limits() -> None:
    os.nice(TRIAL_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Unlike the check in _compile_and_report, this also ends code that never returns to Python.
    # At the hard limit, the signal would be SIGKILL, as for lack of memory.
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_TRIAL_CPU_S + 1, MAX_TRIAL_CPU_S + 2))
    space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = (
        space + COMPILER_STACK_BYTES + 2 * MAX_TRIAL_BYTES
    )  # address space exceeds the memory in use
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # If an allocation fails, the library aborts, and a client could fill the log with dumps.
    faulthandler.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _read_resident_bytes(pid: int) -> int:
    # 0 if the process has exited.
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * resource.getpagesize()
