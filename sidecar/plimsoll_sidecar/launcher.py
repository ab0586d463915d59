"""Run as PID 1 of the supervisor's container: answer the probes and restart the supervisor.

A pod is ready only if its native sidecars are ready, so a crash of the supervisor must not take a
healthy engine out of service. The launcher is part of Plimsoll's cost, so it imports few modules.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from plimsoll_api.admin_token import write_token
from plimsoll_api.listening import ALL_ADDRESSES
from plimsoll_api.names import PROBE_PORT, RESTART_BUDGET_RESET_FILE
from plimsoll_sidecar import web
from plimsoll_sidecar.act.readiness import is_ready

FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0
# After a run of this length, the next pause is FIRST_BACK_OFF_S again.
MIN_STABLE_RUN_S = 60.0
# A supervisor that does not stop in time is killed. The grace period of sidecars is longer.
STOP_TIMEOUT_S = 8.0
# While the supervisor does not run or must stop. Otherwise, only signals and probes need a turn,
# and they end the wait.
SHORT_WAIT_S = 0.5
MAX_WAIT_S = 30.0
USAGE = (
    "usage: plimsoll-supervisor --config FILE --run-dir DIR --state-dir DIR"
    " [--metrics-port PORT] [--probe-port PORT] [--host H]\n"
    "       plimsoll-supervisor --reset-restart-budget --state-dir DIR\n"
)


def read_option(arguments: list[str], name: str, default: str | None = None) -> str:
    """Return the value of an option, or else ``default``. Exit with status 2 without both."""
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(name + "="):
            return argument[len(name) + 1 :]
    if default is None:
        sys.stderr.write(f"the option {name} is required\n{USAGE}")
        raise SystemExit(2)
    return default


class Launcher:
    """Runs the supervisor as a child process: answers probes, restarts it, and handles signals."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._state_dir = read_option(arguments, "--state-dir")
        self._probes = _create_probe_server(
            read_option(arguments, "--host", ALL_ADDRESSES),
            read_option(arguments, "--probe-port", str(PROBE_PORT)),
            self._answer_probe,
        )
        self._wake, self._wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_write, False)
        self._probes.watch(self._wake)
        self._child_pid = 0
        self._started_at = 0.0
        self._next_start_at = 0.0
        self._back_off = FIRST_BACK_OFF_S
        self._kill_at: float | None = None
        """Time at which the child is killed; None unless the launcher must stop."""
        self._has_unsent_stop = False

    def run(self) -> int:
        """Run until a SIGTERM or SIGINT arrives, and return the exit status."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_stop_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            self._reap_children()
            now = time.monotonic()
            if self._kill_at is not None:
                if self._child_pid == 0:
                    return 0
                if self._has_unsent_stop:
                    self._has_unsent_stop = False
                    os.kill(self._child_pid, signal.SIGTERM)
                if now >= self._kill_at:
                    os.kill(self._child_pid, signal.SIGKILL)
            elif self._child_pid == 0 and now >= self._next_start_at:
                self._start(now)
            is_steady = self._child_pid != 0 and self._kill_at is None
            self._probes.handle_events(MAX_WAIT_S if is_steady else SHORT_WAIT_S)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 512)

    def _handle_stop_signal(self, signal_number: int, frame: object) -> None:
        # The handler may interrupt _reap_children, which has just freed the child's PID, or _start,
        # which has not stored it yet. Only run() signals the child.
        if self._kill_at is None:
            self._kill_at = time.monotonic() + STOP_TIMEOUT_S
        self._has_unsent_stop = True

    def _start(self, now: float) -> None:
        command = [sys.executable, "-m", "plimsoll_sidecar.main", *self._arguments]
        self._started_at = now
        try:
            self._child_pid = os.posix_spawn(
                sys.executable, command, os.environ, setsigdef=[signal.SIGTERM, signal.SIGINT]
            )
        except OSError as error:  # the engine may have used up the pod's process or memory limit
            sys.stderr.write(f"failed to start the supervisor: {error.strerror}\n")
            self._next_start_at = now + MAX_BACK_OFF_S

    def _reap_children(self) -> None:
        # PID 1 must also reap orphaned processes.
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child_pid:
                self._handle_exit(os.waitstatus_to_exitcode(status))

    def _handle_exit(self, code: int) -> None:
        now, self._child_pid = time.monotonic(), 0
        if now - self._started_at > MIN_STABLE_RUN_S or code == 0:
            self._back_off = FIRST_BACK_OFF_S
        self._next_start_at = now + self._back_off
        if self._kill_at is None:
            sys.stderr.write(
                f"the supervisor exited with status {code}; the launcher restarts it in "
                f"{self._back_off:.1f} s\n"
            )
        self._back_off = min(2 * self._back_off, MAX_BACK_OFF_S)

    def _answer_probe(self, request: web.Request) -> web.Response:
        if request.path == "/ready" and not is_ready(self._state_dir):
            return 503, web.TEXT_CONTENT_TYPE, b"the pod is kept out of service\n"
        return 200, web.TEXT_CONTENT_TYPE, b"ok\n"


def _create_probe_server(
    host: str, port: str, answer: Callable[[web.Request], web.Response]
) -> web.HttpServer:
    try:
        return web.HttpServer(host, int(port), answer)
    except (OSError, ValueError, OverflowError) as error:
        sys.stderr.write(
            f"cannot listen on port {port} (--probe-port) of address {host}: {error}\n"
        )
        raise SystemExit(2) from error


def main() -> int:
    """Run the launcher until SIGTERM, and return the exit status."""
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(USAGE)
        return 0
    state_dir = read_option(arguments, "--state-dir")
    try:
        os.makedirs(state_dir, exist_ok=True)
        if "--reset-restart-budget" in arguments:
            with open(os.path.join(state_dir, RESTART_BUDGET_RESET_FILE), "w"):
                sys.stdout.write(
                    "the supervisor will reset its restart budget when it takes its next sample\n"
                )
            return 0
        run_dir = read_option(arguments, "--run-dir")
        read_option(arguments, "--config")
        os.makedirs(run_dir, exist_ok=True)
        write_token(run_dir)
    except OSError as error:
        sys.stderr.write(
            f"cannot write {error.filename}: {error.strerror}; make its folder writable, and "
            "free space on its volume\n"
        )
        return 2
    return Launcher(arguments).run()


if __name__ == "__main__":
    sys.exit(main())
