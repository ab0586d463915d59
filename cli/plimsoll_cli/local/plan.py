"""Plan the processes of local mode: their commands, environments and files, without I/O."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import SUPERVISOR_MODULE
from plimsoll_api.supervisor_config import CONFIG_FILE, CONTAINER_ENV, SupervisorConfig
from plimsoll_api.units import parse_duration
from plimsoll_cli.errors import UsageError
from plimsoll_operator.render import (
    ReplicaLayout,
    SupervisorLayout,
    make_engine_args,
    make_process_env,
    make_supervisor_args,
    make_supervisor_config,
)

LOOPBACK_ADDRESS = "127.0.0.1"
STOP_MARGIN_S = 10.0
"""Time after a drain for which the engine may free its memory before it is killed."""
REMOVED_VARIABLES = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "PLIMSOLL_INJECT")
"""Variables that processes do not inherit: local mode uses no cluster, and only the manifest may
inject faults."""


@dataclass(frozen=True)
class Command:
    """Command of a process, whose output goes to the file ``log``."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path


@dataclass(frozen=True, kw_only=True)
class SupervisorPlan:
    """Plan of a supervisor, and of its engine if local mode starts the engine.

    If ``startup_timeout_s`` is None, local mode does not wait until the engine is ready.
    ``engine_stop_s`` is the time until a stopping engine is killed.
    """

    root: Path
    layout: SupervisorLayout
    config: SupervisorConfig
    supervisor: Command
    engine: Command | None = None
    startup_timeout_s: float | None = None
    engine_stop_s: float = STOP_MARGIN_S

    @property
    def serving_url(self) -> str:
        """URL of the engine's ``/v1``."""
        return self.config.engine.serving_url

    @property
    def supervisor_url(self) -> str:
        """Base URL of the supervisor's web page, metrics and ``/state``."""
        return f"http://{LOOPBACK_ADDRESS}:{self.layout.metrics_port}"

    @property
    def probe_url(self) -> str:
        """Base URL of the supervisor's readiness and liveness probes."""
        return f"http://{LOOPBACK_ADDRESS}:{self.layout.probe_port}"

    @property
    def run_dir(self) -> Path:
        """Directory of the admin token, which the engine and the supervisor share."""
        return Path(self.layout.run_dir)

    @property
    def state_dir(self) -> Path:
        """Directory of the supervisor's journal."""
        return Path(self.layout.state_dir)


@dataclass(frozen=True, kw_only=True)
class Plan(SupervisorPlan):
    """Plan of one replica of a service from a manifest."""

    service: InferenceService
    layout: ReplicaLayout
    engine: Command
    startup_timeout_s: float

    @property
    def serving_url(self) -> str:
        """URL of the engine's ``/v1``."""
        return f"http://{LOOPBACK_ADDRESS}:{self.layout.port}"


def list_requested_ports(service: InferenceService) -> list[int | None]:
    """Return the requested ports for serving, admin, metrics and probe; None means any port."""
    return [service.spec.engine.port, None, None, None]


def plan_replica(
    service: InferenceService,
    root: Path,
    ports: Sequence[int],
    model_dir: Path,
    environ: Mapping[str, str],
) -> Plan:
    """Return the plan of a local replica. Raises :class:`UsageError`.

    ``ports`` are in the order of :func:`list_requested_ports`; ``root`` is an absolute path.
    """
    # A manifest from a cluster may have a UID, which has no meaning here.
    service = service.model_copy(
        update={"metadata": service.metadata.model_copy(update={"uid": ""})}
    )
    port, admin_port, metrics_port, probe_port = ports
    layout = ReplicaLayout(
        model_dir=str(model_dir),
        run_dir=str(root / "run"),
        state_dir=str(root / "state"),
        config_file=str(root / "etc" / CONFIG_FILE),
        host=LOOPBACK_ADDRESS,
        port=port,
        admin_port=admin_port,
        metrics_port=metrics_port,
        probe_port=probe_port,
    )
    try:
        variables = make_process_env(service)
    except ValueError as error:
        raise UsageError(str(error)) from None
    inherited = _select_environment(environ)
    identity = {"POD_NAME": service.metadata.name, "POD_NAMESPACE": service.metadata.namespace}
    python = (sys.executable, "-m")
    return Plan(
        service=service,
        layout=layout,
        root=root,
        config=make_supervisor_config(service, layout),
        engine=Command(
            "engine",
            (*python, "plimsoll_engine", *make_engine_args(service, layout)),
            inherited | variables,
            root / "engine.log",
        ),
        supervisor=_make_supervisor_command(layout, root, inherited | identity),
        startup_timeout_s=parse_duration(service.spec.engine.startup_timeout),
        engine_stop_s=service.spec.supervision.drain.deadline_s + STOP_MARGIN_S,
    )


def plan_supervisor(
    config: SupervisorConfig,
    root: Path,
    ports: Sequence[int],
    environ: Mapping[str, str],
    command: Sequence[str] = (),
) -> SupervisorPlan:
    """Return the plan of a supervisor for an engine without a manifest.

    ``ports`` are for metrics and probe. ``command`` starts the engine; it is empty if the engine
    already runs.
    """
    metrics_port, probe_port = ports
    layout = SupervisorLayout(
        run_dir=str(root / "run"),
        state_dir=str(root / "state"),
        config_file=str(root / "etc" / CONFIG_FILE),
        host=LOOPBACK_ADDRESS,
        metrics_port=metrics_port,
        probe_port=probe_port,
    )
    inherited = _select_environment(environ)
    named = inherited | {CONTAINER_ENV: config.engine.container}
    return SupervisorPlan(
        root=root,
        layout=layout,
        config=config,
        supervisor=_make_supervisor_command(layout, root, inherited),
        engine=Command("engine", tuple(command), named, root / "engine.log") if command else None,
        engine_stop_s=config.supervision.drain.deadline_s + STOP_MARGIN_S,
    )


def _select_environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if k not in REMOVED_VARIABLES}


def _make_supervisor_command(
    layout: SupervisorLayout, root: Path, environ: dict[str, str]
) -> Command:
    argv = (sys.executable, "-m", SUPERVISOR_MODULE, *make_supervisor_args(layout))
    return Command("supervisor", argv, environ, root / "supervisor.log")


def list_ignored_fields(service: InferenceService) -> list[str]:
    """Return a message for each field of the manifest that local mode ignores."""
    spec = service.spec
    lines = []
    if spec.replicas != 1:
        lines.append(f"spec.replicas is {spec.replicas}: local mode runs one replica")
    if spec.pod_template:
        lines.append("spec.podTemplate has no effect in local mode")
    if spec.engine.resources.resource_claims:
        lines.append(
            "spec.engine.resources.resourceClaims has no effect in local mode: the engine sees "
            "all devices"
        )
    if spec.engine.resources.limits or spec.engine.resources.requests:
        lines.append(
            "spec.engine.resources does not limit the engine in local mode; the supervisor still "
            "compares its memory with the limit"
        )
    return lines
