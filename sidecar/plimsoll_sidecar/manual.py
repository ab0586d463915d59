"""Perform a manual action on one replica (see :mod:`plimsoll_sidecar.ask`).

The action is refused if the engine has restarted since the person looked. A manual restart takes no
restart slot. Each action leaves a note, from which the supervisor records an incident.
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

from plimsoll_api.action_answer import CURRENT_EPOCH, ActionAnswer
from plimsoll_api.admin import Capability, DrainMode
from plimsoll_api.decoding import decode
from plimsoll_api.files import replace_file
from plimsoll_api.incident_record import JOURNAL_FILE
from plimsoll_api.names import (
    ASK_MODULE,
    DEFAULT_DRAIN_S,
    ENGINE_CONTAINER,
    RESTART_BUDGET_RESET_FILE,
    TOKEN_FILE,
)
from plimsoll_api.pod_devices import CLAIMED_DEVICES_FILE, make_container_key
from plimsoll_api.supervisor_config import CONFIG_FILE, SupervisorConfig
from plimsoll_sidecar import tune
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter, create_adapter
from plimsoll_sidecar.clients.http import EngineError
from plimsoll_sidecar.config import ConfigError, ConfigFile
from plimsoll_sidecar.govern.command import Command, Outcome, Result, Verb
from plimsoll_sidecar.govern.event_incidents import REASON_BY_ACTION, ManualAction
from plimsoll_sidecar.record.storage import read_last_epoch, read_learned_budgets
from plimsoll_sidecar.signals.process_table import ProcessId, identify

VERB_BY_ACTION = {
    "trim": Verb.TRIM,
    "drain": Verb.DRAIN,
    "restart": Verb.RESTART_WORKER,
    "resume": Verb.DRAIN,  # never sent: only its result is used
}
SHARED_DEVICE_NOTE = " (shared device: only the memory of the engine's own allocator counts)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}\n{self.format_usage()}")


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of the options. For invalid options, it raises ValueError."""
    parse = _Parser(prog=f"python -m {ASK_MODULE}", description=__doc__)
    parse.add_argument("action", choices=["status", "trim", "drain", "restart", "resume"])
    parse.add_argument("--config", type=Path, default=Path("/etc/plimsoll") / CONFIG_FILE)
    parse.add_argument("--run-dir", type=Path, default=Path("/run/plimsoll"))
    parse.add_argument("--state-dir", type=Path, default=Path("/var/lib/plimsoll"))
    parse.add_argument(
        "--expected-epoch",
        help=(
            "epoch of the engine for which you chose the action, or 'current' for its present epoch"
        ),
    )
    parse.add_argument(
        "--deadline",
        type=_parse_seconds,
        default=DEFAULT_DRAIN_S,
        help="maximum seconds to wait for running requests",
    )
    parse.add_argument(
        "--service",
        action="store_true",
        help="with 'resume', also clear the restart counts of the other replicas of the service",
    )
    return parse


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= readiness.MAX_UNREADY_DURATION_S:  # also rejects nan
        raise argparse.ArgumentTypeError(
            f"must be from 0 to {readiness.MAX_UNREADY_DURATION_S:.0f} seconds, got {text}"
        )
    return seconds


def perform_action(
    arguments: argparse.Namespace, engine: EngineAdapter, config: SupervisorConfig
) -> ActionAnswer:
    """Perform an action, and return the answer. Raises EngineError without an engine."""
    status = engine.status()
    answer = ActionAnswer(
        epoch=status.epoch,
        state=status.state.value,
        version=status.version,
        capabilities=[capability.value for capability in status.capabilities],
    )
    if arguments.action == "status":
        answer.budgets = _list_unsuitable_budgets(arguments.state_dir, config)
        answer.out_of_service = readiness.read_active_reasons(str(arguments.state_dir))
        return _add_signals(
            engine, answer, config.memory.shared_device, config.engine.container, arguments.config
        )
    expected = (
        status.epoch if arguments.expected_epoch == CURRENT_EPOCH else arguments.expected_epoch
    )
    if expected != status.epoch:
        answer.outcome = Outcome.REFUSED.value
        answer.message = (
            f"the engine is in epoch {status.epoch}, not in epoch {expected}: check the "
            "state of the replica, and run the command again with the new epoch"
        )
        return answer
    note = ManualAction(
        id=f"person-{os.urandom(4).hex()}", action=arguments.action, epoch=expected, at=time.time()
    )
    command = _make_command(arguments, note)
    note_error = _try_write_note(arguments.state_dir, note)
    try:
        result = _execute_action(arguments, engine, config, command, frozenset(status.capabilities))
    except EngineError as error:
        result = command.make_result(Outcome.FAILED, str(error))
    answer.outcome, answer.message = result.outcome.value, result.message
    ended = msgspec.structs.replace(
        note, outcome=result.outcome, message=result.message[:1000], finished_at=time.time()
    )
    note_error = _try_write_note(arguments.state_dir, ended) or note_error
    if note_error is not None:
        answer.message += (
            " (no incident records this action, because its note could not be written: "
            f"{note_error})"
        )
    return answer


def _execute_action(
    arguments: argparse.Namespace,
    engine: EngineAdapter,
    config: SupervisorConfig,
    command: Command,
    capabilities: frozenset[Capability],
) -> Result:
    match arguments.action:
        case "trim":
            return engine.trim(command)
        case "restart" if Capability.RESTART_WORKER in capabilities:
            return engine.restart_worker(command)
        case "restart":
            return readiness.end_engine_while_unready(
                str(arguments.state_dir), lambda: _restart_engine(engine, config, command)
            )
        case "drain":
            return _drain(str(arguments.state_dir), engine, config, command)
        case _:
            return _resume(arguments, engine, config, command)


def _drain(
    state_dir: str, engine: EngineAdapter, config: SupervisorConfig, command: Command
) -> Result:
    # No client may reach a drained engine, because it refuses new requests. If the drain fails, an
    # earlier manual drain stays active. A concurrent resume ends the drain.
    def is_wanted() -> bool:
        return readiness.MANUAL in readiness.read_active_reasons(state_dir)

    before = readiness.read_active_reasons(state_dir).get(readiness.MANUAL)
    readiness.set_unready(state_dir, readiness.MANUAL, readiness.MAX_UNREADY_DURATION_S)
    outcome: Outcome | None = None
    try:
        _leave_services(config, engine)
        if is_wanted():
            result = engine.drain(command, is_wanted)
        else:
            message = "the drain was cancelled before it began"
            result = command.make_result(Outcome.REFUSED, message)
        outcome = result.outcome
    finally:
        if outcome is not Outcome.SUCCEEDED and is_wanted():
            if before is not None:
                readiness.set_unready(state_dir, readiness.MANUAL, before)
            elif outcome is Outcome.REFUSED:
                readiness.clear_reasons(state_dir, readiness.MANUAL)
            else:  # the engine may still be draining
                readiness.end_drain(state_dir, readiness.MANUAL)
    return result


def _restart_engine(engine: EngineAdapter, config: SupervisorConfig, command: Command) -> Result:
    _leave_services(config, engine)
    finished = engine.finish_requests(command)
    return engine.restart_engine(command) if finished.outcome is Outcome.SUCCEEDED else finished


def _leave_services(config: SupervisorConfig, engine: EngineAdapter) -> None:
    pod = os.environ.get("POD_NAME")
    if not pod:
        return
    from plimsoll_sidecar.act import pod_services
    from plimsoll_sidecar.clients.kube import KubeClient

    kube = KubeClient.create_in_cluster()
    services = pod_services.create_pod_services(kube, config.service, pod)
    pod_services.wait_until_left(services, engine.read_arrivals)


def _try_write_note(state_dir: Path, action: ManualAction) -> str | None:
    # Without a note, the action continues.
    try:
        write_note(state_dir, action)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def _add_signals(
    engine: EngineAdapter,
    answer: ActionAnswer,
    is_device_shared: bool,
    container: str,
    config_file: Path,
) -> ActionAnswer:
    # A sample shows the available sources of memory sizes better than a check of mounts and
    # permissions.
    from plimsoll_api.version import get_version
    from plimsoll_sidecar.act.lease_counts import read_pod_uid
    from plimsoll_sidecar.clients.kube import SERVICE_ACCOUNT_FOLDER
    from plimsoll_sidecar.signals.device_memory import AmdExporter, Dcgm, Nvml, PodContainer
    from plimsoll_sidecar.signals.other_pods import PodDevicesFile
    from plimsoll_sidecar.signals.sampler import Sampler
    from plimsoll_sidecar.signals.shared_memory import OrphanedMemory

    mine, orphaned = PodContainer.from_environment(container), OrphanedMemory.create_for_this_pod()
    key = make_container_key(
        read_pod_uid(SERVICE_ACCOUNT_FOLDER / "token"), container or ENGINE_CONTAINER
    )
    sampler = Sampler(
        engine,
        dcgm=Dcgm.from_environment(mine),
        amd=AmdExporter.from_environment(mine),
        orphaned=orphaned,
        list_claimed_devices=PodDevicesFile(config_file.with_name(CLAIMED_DEVICES_FILE), key).read,
    )
    sample = sampler.sample()
    host = sample.host
    if host is not None:
        sources = {"cgroup": host.cgroup_anon, "processes": host.rss_anon}
        answer.host_memory = ", ".join(name for name, size in sources.items() if size is not None)
    if any(device.used is not None for device in sample.device or ()):
        seen = next((device.shared for device in sample.device if device.shared), None)
        answer.device_memory = (sampler.device_source or "") + (
            SHARED_DEVICE_NOTE if is_device_shared or seen else ""
        )
        answer.device_memory += f": {seen}" if seen else ""
    answer.device_reasons = sampler.explain_unused_sources()
    if orphaned is not None:
        answer.shared_orphan, answer.shared_memory_error = host.shm_orphan, orphaned.error or ""
    answer.nvml, answer.supervisor = Nvml().describe(), get_version()
    return answer


def _make_command(arguments: argparse.Namespace, note: ManualAction) -> Command:
    return Command(
        verb=VERB_BY_ACTION[arguments.action],
        operation_id=f"{note.id}-{arguments.action}",
        incident=note.id,
        epoch=note.epoch,
        mode=DrainMode.CARRY if arguments.action == "restart" else DrainMode.FINISH,
        deadline_s=arguments.deadline,
    )


def _resume(
    arguments: argparse.Namespace, engine: EngineAdapter, config: SupervisorConfig, command: Command
) -> Result:
    # All reasons end, because after a resume, a person expects the replica to serve immediately.
    folder = str(arguments.state_dir)
    readiness.clear_reasons(folder, readiness.RESTART)
    for drain in readiness.DRAIN_REASONS:
        readiness.end_drain(folder, drain)
    # The supervisor also resumes the engine, because it has its own record of the drain.
    engine.resume(command.epoch)
    (arguments.state_dir / RESTART_BUDGET_RESET_FILE).touch()
    done = [
        "the replica is back in service",
        "the restart budget in the journal of the replica is reset",
    ]
    if not config.slots:
        return command.make_result(Outcome.SUCCEEDED, "; ".join(done))
    from plimsoll_sidecar.act import lease_counts
    from plimsoll_sidecar.clients.kube import SERVICE_ACCOUNT_FOLDER, KubeClient, KubeError

    kube, pod = KubeClient.create_in_cluster(), os.environ.get("POD_NAME", "")
    try:
        if kube is None:
            raise KubeError(0, "this replica does not run as a pod of a Kubernetes cluster")
        own = lease_counts.read_pod_uid(SERVICE_ACCOUNT_FOLDER / "token")
        uid = lease_counts.make_replica_key(config.service.group, own)
        done.append(lease_counts.reset_counts(kube, config, pod, uid, arguments.service))
    except KubeError as error:
        done.append(
            f"failed to clear the restarts on the slot Leases: {error}; run plimsoll resume again"
        )
        return command.make_result(Outcome.FAILED, "; ".join(done))
    return command.make_result(Outcome.SUCCEEDED, "; ".join(done))


def _list_unsuitable_budgets(state_dir: Path, config: SupervisorConfig) -> list[str]:
    try:
        return tune.explain_unsuitable_budgets(
            read_learned_budgets(state_dir / JOURNAL_FILE), config.memory
        )
    except (OSError, ValueError) as error:
        log.info("cannot check the leak budgets against the learned budgets: %s", error)
        return []


def run_command(
    argv: list[str], missing_signals: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a manual action, and return the exit status and the answer.

    The status is 0 or 1 with the answer as JSON, or 2 with the reason as text. ``missing_signals``
    holds the reason for each missing signal, for the action ``status``.
    """
    try:
        arguments = create_parser().parse_args(argv)
        config = ConfigFile(arguments.config).current
        engine = create_adapter(config.engine, arguments.run_dir / TOKEN_FILE)
        engine.continue_epoch(read_last_epoch(arguments.state_dir / JOURNAL_FILE) or "")
        answer = perform_action(arguments, engine, config)
        answer.unseen = dict(missing_signals or {}) if arguments.action == "status" else {}
    except EngineError as error:
        answer = ActionAnswer(outcome=Outcome.FAILED.value, message=str(error))
    except (ConfigError, OSError, ValueError) as error:
        return 2, str(error)
    failed = answer.outcome not in ("", Outcome.SUCCEEDED.value)
    return int(failed), msgspec.json.encode(answer).decode()


log = logging.getLogger(__name__)

NOTES_FOLDER = "by-hand"
MAX_NOTES = 64
MAX_NOTE_BYTES = 1 << 14


class Note(msgspec.Struct, frozen=True):
    """A manual action, and the process ``by`` that performs it; None if unknown."""

    action: ManualAction
    by: ProcessId | None


def write_note(state_dir: Path, action: ManualAction) -> None:
    """Write or update the note of an action that this process performs. Raises OSError."""
    folder = state_dir / NOTES_FOLDER
    folder.mkdir(exist_ok=True)
    note = Note(action, identify(os.getpid()))
    replace_file(folder / f"{action.id}.json", msgspec.json.encode(note))


class NoteInbox:
    """Reads the notes of manual actions, for the supervisor.

    Call :meth:`delete_read_notes` after the journal has stored the actions.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / NOTES_FOLDER
        self._returned: set[Path] = set()

    def read(self) -> list[ManualAction]:
        """Return the actions that are running, or have finished since the last call."""
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".json"))
        except OSError:
            return []
        actions = []
        for name in names[:MAX_NOTES]:
            path = self._folder / name
            if path in self._returned:
                continue
            try:
                action = _read_note(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                log.warning(
                    "deleted %s, which is not a valid note of a manual action: %s", path, error
                )
                _remove_note(path)
                continue
            if action.outcome is not None:
                self._returned.add(path)
            actions.append(action)
        return actions

    def delete_read_notes(self) -> None:
        """Delete the notes of finished actions that :meth:`read` has returned."""
        for path in self._returned:
            _remove_note(path)
        self._returned.clear()


def _read_note(path: Path) -> ManualAction:
    with path.open("rb") as file:
        data = file.read(MAX_NOTE_BYTES + 1)
    if len(data) > MAX_NOTE_BYTES:
        raise ValueError(f"the file must not be larger than {MAX_NOTE_BYTES >> 10} KiB")
    note = decode(data, Note)
    action = note.action
    if action.action not in REASON_BY_ACTION:
        raise ValueError(
            f"action must be one of {', '.join(REASON_BY_ACTION)}, got {action.action!r}"
        )
    if path.stem != action.id:
        raise ValueError(f"the name of the file must be the ID of the action, {action.id!r}")
    if action.outcome is None and (note.by is None or identify(note.by.pid) != note.by):
        return msgspec.structs.replace(
            action,
            outcome=Outcome.UNKNOWN,
            message="the command was interrupted before it finished",
        )
    return action


def _remove_note(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
