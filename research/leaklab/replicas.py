"""Replicas of the leak lab: a real engine or the plain one, each beside its own real supervisor.

The processes are those of ``plimsoll run --local``: containers that are started again, the
launcher, the supervisor with its journal. Only the engine's command line may be another.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from plimsoll_api.incident_record import JOURNAL_FILE, IncidentRecord
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import API_VERSION, SERVICE_KIND
from plimsoll_api.supervision import Mode
from plimsoll_cli import incidents
from plimsoll_cli.errors import UsageError
from plimsoll_cli.local import plan
from plimsoll_cli.local.plan import Command, Plan
from plimsoll_cli.local.runner import choose_free_ports

RESEARCH = Path(__file__).resolve().parents[1]
ALWAYS = ("PATH", "HOME", "PYTHONPATH", "LANG", "TMPDIR", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Policy:
    """What the supervisor is told. Bytes and seconds."""

    growth_mib: int = 64
    window: str = "1h"
    warmup: str = "4s"
    stall: str = "8s"
    restarts: int = 3
    mode: Mode = Mode.RECOVER
    interval_s: float = 0.5
    limit: str = "4Gi"
    ladder: Sequence[str] = field(default=("Trim", "WorkerRestart", "EngineRestart"))


def engine(
    name: str,
    root: Path,
    model: Path,
    policy: Policy,
    environ: Mapping[str, str],
    inject: str = "",
    flags: Sequence[str] = (),
) -> Plan:
    """Our engine on the CPU, with the faults of ``inject``."""
    args = ["--device=cpu", "--dtype=float32", *flags]
    spec: dict[str, object] = {"args": args}
    if inject:
        spec["args"] = [*args, "--allow-inject"]
        spec["env"] = [{"name": "PLIMSOLL_INJECT", "value": inject}]
    return _plan(name, root, model, policy, environ, spec)


def plain(
    name: str,
    root: Path,
    policy: Policy,
    environ: Mapping[str, str],
    mechanism: str,
    *flags: str,
) -> Plan:
    """The plain Python engine, known to its supervisor as ``custom``."""
    spec: dict[str, object] = {"type": "custom", "image": "none"}
    made = _plan(name, root, root, policy, environ, spec)
    module = ("-m", "leaklab.plain_engine", f"--port={made.layout.port}")
    argv = (sys.executable, *module, f"--mechanism={mechanism}", *flags)
    variables = {key: value for key, value in environ.items() if key in ALWAYS}
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(RESEARCH), environ.get("PYTHONPATH")])
    )
    return replace(made, engine=Command("engine", argv, variables, made.engine.log))


def journal(its_plan: Plan) -> list[IncidentRecord]:
    """All incidents of a replica, oldest first; none where its journal is not made yet."""
    try:
        return incidents.read_journal(its_plan.state_dir / JOURNAL_FILE)[::-1]
    except UsageError:
        return []


def _plan(
    name: str,
    root: Path,
    model: Path,
    policy: Policy,
    environ: Mapping[str, str],
    engine_spec: Mapping[str, object],
) -> Plan:
    service = InferenceService.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": SERVICE_KIND,
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": f"file://{model}", "servedName": "tiny"},
                "engine": {**engine_spec, "resources": {"limits": {"memory": policy.limit}}},
                "memory": {
                    "host": {"growthBudget": f"{policy.growth_mib}Mi", "window": policy.window},
                    "warmup": policy.warmup,
                },
                "supervision": {
                    "mode": policy.mode.value,
                    "ladder": list(policy.ladder),
                    "drain": {"deadline": "10s"},
                    "stall": {"timeout": policy.stall},
                    "restartBudget": {"count": policy.restarts, "window": policy.window},
                },
            },
        }
    )
    made = plan.plan_replica(service, root, choose_free_ports([None] * 4), model, environ)
    config = msgspec.structs.replace(made.config, sample_interval_s=policy.interval_s)
    return replace(made, config=config)
