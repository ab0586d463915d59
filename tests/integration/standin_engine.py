"""An engine that speaks the admin protocol and serves nobody: only for tests of the supervisor.

``python standin_engine.py --port P --token-file F --log FILE [--leak] [--hang]
[--unresponsive-after N]``

Memory is a number that grows in the first epoch when ``--leak`` is given; with ``--hang`` the work
counter of the first epoch stands still; with ``--unresponsive-after`` it answers nothing any more
after so many answers to GET /status, however late the first one is asked for. Each restart adds a
line to ``--log``, and each lease on a standby worker one to ``LOG.standby``. An engine restart runs
the program again in the same process, as the restart of a container would.
"""

import argparse
import hmac
import os
import secrets
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from plimsoll_api import admin

BASELINE = 100 << 20
RATE = 20 << 20
RESTART_S = 0.3


class Engine:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.boot = secrets.token_hex(4)
        self.number = 1
        self.state = admin.EngineState.SERVING
        self.began = time.monotonic()
        self.operations: dict[str, admin.Operation] = {}
        self.lock = threading.Lock()
        self.sick = not Path(arguments.log).exists()
        self.told = 0
        """Answers to GET /status."""
        self.standby = admin.StandbyStatus(admin.StandbyState.ABSENT)

    @property
    def epoch(self) -> str:
        return f"{self.boot}:{self.number}"

    def status(self) -> admin.Status:
        age = time.monotonic() - self.began
        grown = int(RATE * age) if self.arguments.leak and self.sick else 0
        steps = 0 if self.arguments.hang and self.sick else 1 + int(age * 100)
        processes = [
            admin.ProcessMemory(role=admin.Role.FRONTEND, pid=os.getpid()),
            admin.ProcessMemory(
                role=admin.Role.WORKER, pid=os.getpid(), python_objects=BASELINE + grown
            ),
        ]
        return admin.Status(
            state=self.state,
            epoch=self.epoch,
            version="test",
            model="standin",
            uptime_s=age,
            load=admin.Load(running=1, waiting=1, inflight=2, steps_total=steps),
            processes=processes,
            capabilities=list(admin.Capability),
            report_age_s=0.0,
            standby=self.standby,
        )

    def lease(self, body: admin.StandbyRequest) -> None:
        if body.expected_epoch != self.epoch:
            raise Conflict("EpochChanged", f"decided on {body.expected_epoch}", self.epoch)
        with open(self.arguments.log + ".standby", "a") as log:
            log.write(f"{body.lease_s:g} {self.epoch} {len(self.operations)}\n")
        state = admin.StandbyState.PREPARED if body.lease_s else admin.StandbyState.ABSENT
        self.standby = admin.StandbyStatus(state)

    def operate(self, kind: str, body: admin._Request) -> admin.Operation:
        with self.lock:
            known = self.operations.get(body.operation_id)
            if known is not None:
                return known
            if body.expected_epoch != self.epoch:
                raise Conflict("EpochChanged", f"decided on {body.expected_epoch}", self.epoch)
            if any(o.state is admin.OperationState.RUNNING for o in self.operations.values()):
                raise Conflict("OperationInProgress", "another operation is under way", self.epoch)
            operation = admin.Operation(
                id=body.operation_id,
                kind=kind,
                state=admin.OperationState.RUNNING,
                epoch_before=self.epoch,
                started_at=time.time(),
            )
            self.operations[operation.id] = operation
        threading.Thread(target=self.carry_out, args=(operation, body), daemon=True).start()
        return operation

    def carry_out(self, operation: admin.Operation, body: admin._Request) -> None:
        time.sleep(0.05)
        if isinstance(body, admin.RestartRequest):
            self.state = admin.EngineState.RESTARTING
            time.sleep(RESTART_S)
            with open(self.arguments.log, "a") as log:
                log.write(f"{body.scope.value} {operation.epoch_before} {operation.id}\n")
            if body.scope is admin.Scope.ENGINE:
                os.execv(sys.executable, [sys.executable, *sys.argv])
            self.number, self.began, self.sick = self.number + 1, time.monotonic(), False
            self.state = admin.EngineState.SERVING
        elif isinstance(body, admin.DrainRequest):
            self.state = admin.EngineState.DRAINED
        operation.epoch_after, operation.finished_at = self.epoch, time.time()
        operation.state = admin.OperationState.SUCCEEDED


class Conflict(Exception):
    def __init__(self, code: str, message: str, epoch: str) -> None:
        super().__init__(message)
        self.body = admin.ErrorBody(code=code, message=message, epoch=epoch)


REQUESTS = {
    "/trim": admin.TrimRequest,
    "/drain": admin.DrainRequest,
    "/restart": admin.RestartRequest,
}


def handler(engine: Engine, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, body: object) -> None:
            data = body if isinstance(body, bytes) else msgspec.json.encode(body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def unresponsive(self) -> None:
            after = engine.arguments.unresponsive_after
            if after and engine.sick and engine.told >= after:
                time.sleep(3600)

        def authorised(self) -> bool:
            given = self.headers.get("Authorization", "")
            if hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return True
            self.answer(401, admin.ErrorBody(code="Unauthorized", message="wrong token"))
            return False

        def do_GET(self) -> None:
            self.unresponsive()
            path = self.path.removeprefix(admin.ADMIN_PREFIX)
            if not self.authorised():
                return
            if path == "/status":
                self.answer(200, engine.status())
                engine.told += 1
            elif path.startswith("/diagnostics/"):
                self.answer(200, f"{path} of epoch {engine.epoch}\n".encode())
            elif operation := engine.operations.get(path.removeprefix("/operations/")):
                self.answer(200, operation)
            else:
                self.answer(404, admin.ErrorBody(code="NotFound", message=path))

        def do_POST(self) -> None:
            self.unresponsive()
            path = self.path.removeprefix(admin.ADMIN_PREFIX)
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if not self.authorised():
                return
            try:
                if path == "/resume":
                    engine.state = admin.EngineState.SERVING
                    self.answer(200, engine.status())
                    return
                if path == "/standby":
                    engine.lease(msgspec.json.decode(data, type=admin.StandbyRequest))
                    self.answer(200, engine.status())
                    return
                body = msgspec.json.decode(data, type=REQUESTS[path])
                self.answer(202, engine.operate(path.removeprefix("/"), body))
            except KeyError:
                self.answer(404, admin.ErrorBody(code="NotFound", message=path))
            except msgspec.MsgspecError as error:
                self.answer(400, admin.ErrorBody(code="Invalid", message=str(error)))
            except Conflict as conflict:
                self.answer(409, conflict.body)

        def log_message(self, format: str, *args: object) -> None:
            return

    return Handler


def main() -> None:
    parse = argparse.ArgumentParser()
    parse.add_argument("--port", type=int, required=True)
    parse.add_argument("--token-file", type=Path, required=True)
    parse.add_argument("--log", required=True)
    parse.add_argument("--leak", action="store_true")
    parse.add_argument("--hang", action="store_true")
    parse.add_argument("--unresponsive-after", type=int, default=0)
    arguments = parse.parse_args()
    engine = Engine(arguments)
    token = arguments.token_file.read_text().strip()
    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer.daemon_threads = True
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), handler(engine, token))
    print("serving", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
