"""What a person asks of one replica, run in its supervisor's container by ``kubectl exec``.

    python -m plimsoll_sidecar.ask status
    python -m plimsoll_sidecar.ask restart --expected-epoch 3f9c21d0:4

Who may exec into the pod may do this: the cluster's RBAC decides. Every action is fenced: it names
the epoch that the person saw, and an engine in another epoch refuses. A restart by hand takes no
restart slot; it is counted when the supervisor sees the new epoch.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from importlib.metadata import version
from pathlib import Path

import msgspec

from plimsoll_api.admin import Capability, DrainMode
from plimsoll_api.supervision import CONFIG_FILE
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.adapter import EngineAdapter, EngineError
from plimsoll_sidecar.act.engines import adapter_for
from plimsoll_sidecar.config import ConfigError, ConfigFile
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from plimsoll_sidecar.launcher import RESET_FILE, TOKEN_FILE
from plimsoll_sidecar.signals import nvml
from plimsoll_sidecar.signals.dcgm import Dcgm
from plimsoll_sidecar.signals.sampler import Sampler

VERBS = {
    "trim": Verb.TRIM,
    "drain": Verb.DRAIN,
    "restart": Verb.RESTART_WORKER,
}
AWAY_S = 900.0
"""A replica that was drained by hand goes back into service by itself after this time."""
DEADLINE_S = 30.0
ONLY_OWN = " (shared with other pods: only the engine's own allocator is judged)"


class Answer(msgspec.Struct, omit_defaults=True):
    """What is printed, as one line of JSON. ``outcome`` is empty for ``status``.

    For ``status`` also what this container sees: the sources of host and of device memory, empty
    where it sees none, and what NVML says when it is asked.
    """

    epoch: str | None = None
    state: str | None = None
    version: str | None = None
    capabilities: list[str] = []
    outcome: str = ""
    message: str = ""
    supervisor: str = ""
    host_memory: str = ""
    device_memory: str = ""
    nvml: str = ""


def parser() -> argparse.ArgumentParser:
    parse = argparse.ArgumentParser(prog="python -m plimsoll_sidecar.ask", description=__doc__)
    parse.add_argument("what", choices=["status", "trim", "drain", "restart", "resume"])
    parse.add_argument("--config", type=Path, default=Path("/etc/plimsoll") / CONFIG_FILE)
    parse.add_argument("--run-dir", type=Path, default=Path("/run/plimsoll"))
    parse.add_argument("--state-dir", type=Path, default=Path("/var/lib/plimsoll"))
    parse.add_argument("--expected-epoch", help="the epoch that the action was decided on")
    parse.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds of a drain")
    return parse


def ask(arguments: argparse.Namespace, engine: EngineAdapter, shared: bool = False) -> Answer:
    """Does what was asked. Raises EngineError where the engine does not answer.

    ``shared`` says that the engine's devices are other pods', too.
    """
    status = engine.status()
    answer = Answer(
        epoch=status.epoch,
        state=status.state.value,
        version=status.version,
        capabilities=[one.value for one in status.capabilities],
    )
    if arguments.what == "status":
        return _sees(engine, answer, shared)
    expected = arguments.expected_epoch
    if expected != status.epoch:
        answer.outcome = Outcome.REFUSED.value
        answer.message = f"the engine is in epoch {status.epoch}, not {expected}: look again"
        return answer
    if arguments.what == "resume":
        _resume(arguments.state_dir, engine, expected)
        answer.outcome = Outcome.SUCCEEDED.value
        answer.message = "in service again; the restart budget is reset within a sample"
        return answer
    command = _command(arguments, expected)
    if arguments.what == "drain":
        readiness.write(str(arguments.state_dir), command.deadline_s + AWAY_S)
    act = {"trim": engine.trim, "drain": engine.drain, "restart": engine.restart_worker}
    if Capability.RESTART_WORKER not in status.capabilities:
        act["restart"] = engine.restart_engine
    result = act[arguments.what](command)
    if arguments.what == "drain" and result.outcome is not Outcome.SUCCEEDED:
        readiness.remove(str(arguments.state_dir))
    answer.outcome, answer.message = result.outcome.value, result.message
    return answer


def _sees(engine: EngineAdapter, answer: Answer, shared: bool) -> Answer:
    """One sample says more than any check of mounts and permissions."""
    sampler = Sampler(engine, exporter=Dcgm.of_node())
    sample = sampler.sample()
    host = sample.host
    if host is not None:
        sources = {"cgroup": host.cgroup_anon, "processes": host.rss_anon}
        answer.host_memory = ", ".join(name for name, size in sources.items() if size is not None)
    if any(device.used is not None for device in sample.device or ()):
        answer.device_memory = (sampler.device_source or "") + (ONLY_OWN if shared else "")
    answer.nvml, answer.supervisor = nvml.describe(), version("plimsoll")
    return answer


def _command(arguments: argparse.Namespace, epoch: str) -> Command:
    name = f"person-{uuid.uuid4().hex[:8]}"
    carry = arguments.what == "restart"
    return Command(
        verb=VERBS[arguments.what],
        operation_id=f"{name}-{arguments.what}",
        incident=name,
        epoch=epoch,
        mode=DrainMode.CARRY if carry else DrainMode.FINISH,
        deadline_s=arguments.deadline,
    )


def _resume(state_dir: Path, engine: EngineAdapter, epoch: str) -> None:
    readiness.remove(str(state_dir))
    engine.resume(epoch)
    (state_dir / RESET_FILE).touch()


def main(argv: list[str] | None = None) -> int:
    """0: done. 1: failed or refused, the answer says why. 2: cannot be asked."""
    arguments = parser().parse_args(argv)
    try:
        config = ConfigFile(arguments.config).current
        engine = adapter_for(config.engine, arguments.run_dir / TOKEN_FILE)
        answer = ask(arguments, engine, config.memory.shared_device)
    except EngineError as error:
        answer = Answer(outcome=Outcome.FAILED.value, message=str(error))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(msgspec.json.encode(answer).decode() + os.linesep)
    return int(answer.outcome not in ("", Outcome.SUCCEEDED.value))


if __name__ == "__main__":
    sys.exit(main())
