"""Configuration and arguments of the supervisor, the same in a pod and in local mode."""

from __future__ import annotations

from typing import get_args

from plimsoll_api import inferenceservice
from plimsoll_api.inferenceservice import InferenceService, MemoryBudget, Weekday
from plimsoll_api.serving import Engine
from plimsoll_api.supervision import (
    Budget,
    Drain,
    EngineEndpoint,
    EngineType,
    MaintenanceWindow,
    MemoryPolicy,
    RestartBudget,
    ServiceRef,
    Supervision,
    SupervisorConfig,
)
from plimsoll_api.units import parse_bytes, parse_duration
from plimsoll_operator.render.names import slots
from plimsoll_operator.render.paths import Places, in_pod


def supervisor_config(service: InferenceService, places: Places | None = None) -> SupervisorConfig:
    """What the manifest means, in bytes and seconds. Without a uid there are no slot Leases."""
    at = places or in_pod(service)
    meta, spec = service.metadata, service.spec
    memory, supervision = spec.memory, spec.supervision
    return SupervisorConfig(
        service=ServiceRef(name=meta.name, namespace=meta.namespace, uid=meta.uid),
        engine=EngineEndpoint(
            type=_contract(spec.engine),
            admin_url=_admin_url(spec.engine, at),
            serving_url=f"http://127.0.0.1:{at.port}",
            model=service.served_name,
        ),
        memory=MemoryPolicy(
            host=_budget(memory.host, spec.engine.resources.limits.get("memory")),
            device=_budget(memory.device, None),
            shared_device=memory.shared_device or _shares(spec.engine),
            warmup_s=parse_duration(memory.warmup),
        ),
        supervision=Supervision(
            mode=supervision.mode,
            ladder=tuple(supervision.ladder),
            drain=Drain(
                mode=supervision.drain.mode,
                deadline_s=parse_duration(supervision.drain.deadline),
            ),
            restart_budget=RestartBudget(
                count=supervision.restart_budget.count,
                window_s=parse_duration(supervision.restart_budget.window),
            ),
            stall_timeout_s=parse_duration(supervision.stall.timeout),
            maintenance_window=_window(supervision.maintenance_window),
            log_level=supervision.log_level,
        ),
        slots=slots(meta.name, supervision.max_unavailable) if meta.uid else (),
    )


def _contract(engine: Engine) -> EngineType:
    """By which verbs the supervisor speaks to the engine."""
    return EngineType.PLIMSOLL if engine.admin_contract == "plimsoll" else engine.type


def _shares(engine: Engine) -> bool:
    """Whether a device plugin gives slices of time: it names such resources ``….shared``."""
    resources = engine.resources
    return any(name.endswith(".shared") for name in (*resources.limits, *resources.requests))


def _admin_url(engine: Engine, at: Places) -> str:
    """Our protocol has a port of its own; a foreign engine's verbs are on the serving port."""
    own = _contract(engine) is EngineType.PLIMSOLL
    return f"http://127.0.0.1:{at.admin_port if own else at.port}"


def _window(window: inferenceservice.MaintenanceWindow | None) -> MaintenanceWindow | None:
    if window is None:
        return None
    hours, minutes = map(int, window.start.split(":"))
    names = get_args(Weekday)
    return MaintenanceWindow(
        start_s=3600.0 * hours + 60.0 * minutes,
        duration_s=parse_duration(window.duration),
        days=tuple(sorted({names.index(day) for day in window.days})),
    )


def _budget(budget: MemoryBudget | None, default_limit: str | None) -> Budget | None:
    if budget is None:
        return None
    limit = budget.limit or default_limit
    return Budget(
        growth_bytes=parse_bytes(budget.growth_budget),
        window_s=parse_duration(budget.window),
        limit_bytes=parse_bytes(limit) if limit else None,
    )


def supervisor_args(service: InferenceService, places: Places | None = None) -> list[str]:
    """What follows ``python -m plimsoll_sidecar.launcher``."""
    at = places or in_pod(service)
    return [
        f"--config={at.config_file}",
        f"--run-dir={at.run_dir}",
        f"--state-dir={at.state_dir}",
        f"--metrics-port={at.metrics_port}",
        f"--probe-port={at.probe_port}",
        f"--host={at.host}",
    ]
