"""Carries out what a person asks of one replica (see :mod:`plimsoll_sidecar.ask`).

Every action is fenced: it names the epoch that the person saw (``current`` for the present one),
and an engine in another epoch refuses. A restart by hand takes no restart slot; it is counted when
the supervisor sees the new epoch. Each action leaves a record, which the supervisor makes of a note
from here.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from plimsoll_api.action_answer import CURRENT, ActionAnswer
from plimsoll_api.admin import Capability, DrainMode
from plimsoll_api.decoding import decode
from plimsoll_api.names import ASK_MODULE, DRAIN_S, RESET_FILE, TOKEN_FILE
from plimsoll_api.supervisor_config import CONFIG_FILE, SupervisorConfig
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter, adapter_for
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.config import ConfigError, ConfigFile
from plimsoll_sidecar.govern.command import Command, Outcome, Result, Verb
from plimsoll_sidecar.govern.notices import ACTIONS, ManualAction
from plimsoll_sidecar.signals.process_table import ProcessId, identify

VERBS = {
    "trim": Verb.TRIM,
    "drain": Verb.DRAIN,
    "restart": Verb.RESTART_WORKER,
    "resume": Verb.DRAIN,  # it ends one
}
ONLY_OWN = " (shared with other pods: only the engine's own allocator counts)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n{self.format_usage()}")


def parser() -> argparse.ArgumentParser:
    """Return the options of ``ask``.

    Bad usage is an answer in JSON, not a text on standard error.
    """
    parse = _Parser(prog=f"python -m {ASK_MODULE}", description=__doc__)
    parse.add_argument("what", choices=["status", "trim", "drain", "restart", "resume"])
    parse.add_argument("--config", type=Path, default=Path("/etc/plimsoll") / CONFIG_FILE)
    parse.add_argument("--run-dir", type=Path, default=Path("/run/plimsoll"))
    parse.add_argument("--state-dir", type=Path, default=Path("/var/lib/plimsoll"))
    parse.add_argument(
        "--expected-epoch", help="the epoch that the action was decided on; current: the engine's"
    )
    parse.add_argument("--deadline", type=_seconds, default=DRAIN_S, help="seconds of a drain")
    parse.add_argument(
        "--service", action="store_true", help="resume: clear the whole service's restarts, too"
    )
    return parse


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= readiness.MAX_REASON_S:  # nor is it a number where it is "nan"
        raise argparse.ArgumentTypeError(f"{text}: use 0 to {readiness.MAX_REASON_S:.0f} seconds")
    return seconds


def ask(
    arguments: argparse.Namespace, engine: EngineAdapter, config: SupervisorConfig
) -> ActionAnswer:
    """Do what was asked. Raises EngineError where the engine does not answer."""
    status = engine.status()
    answer = ActionAnswer(
        epoch=status.epoch,
        state=status.state.value,
        version=status.version,
        capabilities=[one.value for one in status.capabilities],
    )
    if arguments.what == "status":
        answer.out_of_service = readiness.active_reasons(str(arguments.state_dir))
        return _sees(engine, answer, config.memory.shared_device, config.engine.container)
    expected = status.epoch if arguments.expected_epoch == CURRENT else arguments.expected_epoch
    if expected != status.epoch:
        answer.outcome = Outcome.REFUSED.value
        answer.message = (
            f"the engine is in epoch {status.epoch}, not {expected}: check it and try again"
        )
        return answer
    note = ManualAction(
        id=f"person-{os.urandom(4).hex()}", action=arguments.what, epoch=expected, at=time.time()
    )
    command = _command(arguments, note)
    missing = _note(arguments.state_dir, note)
    try:
        result = _act(arguments, engine, config, command, frozenset(status.capabilities))
    except EngineError as error:
        result = command.result(Outcome.FAILED, str(error))
    answer.outcome, answer.message = result.outcome.value, result.message
    ended = msgspec.structs.replace(
        note, outcome=result.outcome, message=result.message[:1000], finished_at=time.time()
    )
    missing = _note(arguments.state_dir, ended) or missing
    if missing is not None:
        answer.message += f" (not recorded: {missing})"
    return answer


def _act(
    arguments: argparse.Namespace,
    engine: EngineAdapter,
    config: SupervisorConfig,
    command: Command,
    capabilities: frozenset[Capability],
) -> Result:
    match arguments.what:
        case "trim":
            return engine.trim(command)
        case "restart" if Capability.RESTART_WORKER in capabilities:
            return engine.restart_worker(command)
        case "restart":
            return readiness.run_unready(
                str(arguments.state_dir), lambda: _restart_engine(engine, config, command)
            )
        case "drain":
            return _drain(str(arguments.state_dir), engine, command)
        case _:
            return _resume(arguments, engine, config, command)


def _drain(state_dir: str, engine: EngineAdapter, command: Command) -> Result:
    """Take the replica out of service; one that fails leaves an earlier drain as it was.

    A resume meanwhile ends the drain, also where that still waits for requests.
    """

    def stands() -> bool:
        return readiness.MANUAL in readiness.active_reasons(state_dir)

    before = readiness.active_reasons(state_dir).get(readiness.MANUAL)
    readiness.set_unready(state_dir, readiness.MANUAL, readiness.MAX_REASON_S)
    outcome: Outcome | None = None
    try:
        result = engine.drain(command, stands)
        outcome = result.outcome
    finally:
        if outcome is not Outcome.SUCCEEDED and stands():
            if before is not None:
                readiness.set_unready(state_dir, readiness.MANUAL, before)
            elif outcome is Outcome.REFUSED:
                readiness.clear(state_dir, readiness.MANUAL)
            else:  # the engine may continue the drain
                readiness.end_drain(state_dir, readiness.MANUAL)
    return result


def _restart_engine(engine: EngineAdapter, config: SupervisorConfig, command: Command) -> Result:
    """Out of the endpoints first, then the running requests to their end, then the engine."""
    pod = os.environ.get("POD_NAME")
    if pod:
        from plimsoll_sidecar.act import service_exit
        from plimsoll_sidecar.clients.kube import KubeClient

        found = service_exit.endpoints_of_pod(KubeClient.in_cluster(), config.service, pod)
        service_exit.wait_until_left(found)
    finished = engine.finish(command)
    return engine.restart_engine(command) if finished.outcome is Outcome.SUCCEEDED else finished


def _note(state_dir: Path, action: ManualAction) -> str | None:
    """Why the supervisor will not hear of it. What a person asked for is done all the same."""
    try:
        write_note(state_dir, action)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def _sees(
    engine: EngineAdapter, answer: ActionAnswer, shared: bool, container: str
) -> ActionAnswer:
    """One sample says more than any check of mounts and permissions."""
    from plimsoll_api.version import version
    from plimsoll_sidecar.signals.device_memory import AmdExporter, Dcgm, Nvml, Pod
    from plimsoll_sidecar.signals.sampler import Sampler
    from plimsoll_sidecar.signals.shared_memory import OrphanedMemory

    mine, orphaned = Pod.from_environment(container), OrphanedMemory.for_this_pod()
    sampler = Sampler(
        engine,
        exporter=Dcgm.from_environment(mine),
        amd=AmdExporter.from_environment(mine),
        orphaned=orphaned,
    )
    sample = sampler.sample()
    host = sample.host
    if host is not None:
        sources = {"cgroup": host.cgroup_anon, "processes": host.rss_anon}
        answer.host_memory = ", ".join(name for name, size in sources.items() if size is not None)
    if any(device.used is not None for device in sample.device or ()):
        seen = next((device.shared for device in sample.device if device.shared), None)
        answer.device_memory = (sampler.device_source or "") + (ONLY_OWN if shared or seen else "")
        answer.device_memory += f": {seen}" if seen else ""
    answer.device_reasons = sampler.device_reasons()
    if orphaned is not None:
        answer.shared_orphan, answer.shared_memory_error = host.shm_orphan, orphaned.error or ""
    answer.nvml, answer.supervisor = Nvml().describe(), version()
    return answer


def _command(arguments: argparse.Namespace, note: ManualAction) -> Command:
    return Command(
        verb=VERBS[arguments.what],
        operation_id=f"{note.id}-{arguments.what}",
        incident=note.id,
        epoch=note.epoch,
        mode=DrainMode.CARRY if arguments.what == "restart" else DrainMode.FINISH,
        deadline_s=arguments.deadline,
    )


def _resume(
    arguments: argparse.Namespace, engine: EngineAdapter, config: SupervisorConfig, command: Command
) -> Result:
    # For every reason: a person who resumes a replica wants it to serve now.
    folder = str(arguments.state_dir)
    readiness.clear(folder, readiness.RESTART)
    for drain in readiness.DRAINS:
        readiness.end_drain(folder, drain)
    # The supervisor does it as well: it keeps an account of its own of an engine that it drained.
    engine.resume(command.epoch)
    (arguments.state_dir / RESET_FILE).touch()
    done = ["back in service", "the restart budget in the replica's journal is reset"]
    if not config.slots:
        return command.result(Outcome.SUCCEEDED, "; ".join(done))
    from plimsoll_sidecar.act import lease_counts
    from plimsoll_sidecar.clients.kube import ACCOUNT, KubeClient, KubeError

    kube, pod = KubeClient.in_cluster(), os.environ.get("POD_NAME", "")
    try:
        if kube is None:
            raise KubeError(0, "this is not a pod of a cluster")
        uid = lease_counts.pod_uid(ACCOUNT / "token")
        done.append(lease_counts.reset_counts(kube, config, pod, uid, arguments.service))
    except KubeError as error:
        done.append(f"the slot Leases were not cleared: {error}: run plimsoll resume again")
        return command.result(Outcome.FAILED, "; ".join(done))
    return command.result(Outcome.SUCCEEDED, "; ".join(done))


def run(argv: list[str], unseen: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit status and text. ``unseen`` is what the supervisor cannot see, for ``status``.

    0: done. 1: failed or refused, the answer says why. 2: it cannot be asked, and the text is no
    answer but the reason.
    """
    try:
        arguments = parser().parse_args(argv)
        config = ConfigFile(arguments.config).current
        engine = adapter_for(config.engine, arguments.run_dir / TOKEN_FILE)
        answer = ask(arguments, engine, config)
        answer.unseen = dict(unseen or {}) if arguments.what == "status" else {}
    except EngineError as error:
        answer = ActionAnswer(outcome=Outcome.FAILED.value, message=str(error))
    except (ConfigError, OSError, ValueError) as error:
        return 2, str(error)
    failed = answer.outcome not in ("", Outcome.SUCCEEDED.value)
    return int(failed), msgspec.json.encode(answer).decode()


log = logging.getLogger(__name__)

FOLDER = "by-hand"
MAX_FILES = 64
MAX_BYTES = 1 << 14


class Note(msgspec.Struct, frozen=True):
    """An action, and the process that carries it out."""

    action: ManualAction
    by: ProcessId | None


def write_note(state_dir: Path, action: ManualAction) -> None:
    """Note an action of this process, or what became of it. Raises OSError."""
    folder = state_dir / FOLDER
    folder.mkdir(exist_ok=True)
    fresh = folder / f"{action.id}.new"
    fresh.write_bytes(msgspec.json.encode(Note(action, identify(os.getpid()))))
    os.replace(fresh, folder / f"{action.id}.json")


class Inbox:
    """The supervisor's end.

    ``read`` gives each ended action once; ``forget`` removes the files of those, after they are in
    the journal.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER
        self._given: set[Path] = set()

    def read(self) -> list[ManualAction]:
        """Return what is under way, and what has ended since the last call.

        A file that cannot be used is removed: nothing else writes here, and nothing waits for it.
        """
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".json"))
        except OSError:
            return []
        found = []
        for name in names[:MAX_FILES]:
            path = self._folder / name
            if path in self._given:
                continue
            try:
                action = _read(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log.warning("%s: removed because it is not a manual action: %s", path, error)
                _remove(path)
                continue
            if action.outcome is not None:
                self._given.add(path)
            found.append(action)
        return found

    def forget(self) -> None:
        """Remove the notes that were handed out: what they asked for is in the journal now."""
        for path in self._given:
            _remove(path)
        self._given.clear()


def _read(path: Path) -> ManualAction:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 10} KiB")
    note = decode(data, Note)
    action = note.action
    if action.action not in ACTIONS or path.stem != action.id:
        raise ValueError(f"action {action.action!r} of {action.id!r}")
    if action.outcome is None and (note.by is None or identify(note.by.pid) != note.by):
        return msgspec.structs.replace(
            action, outcome=Outcome.UNKNOWN, message="the command was interrupted"
        )
    return action


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
