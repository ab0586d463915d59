"""Render the supervisor's configuration and arguments, in a pod and in local mode."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from plimsoll_api.engines import EngineType
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.memory_policy import MemoryBudget, MemoryPolicy
from plimsoll_api.serving import Engine
from plimsoll_api.supervisor_config import (
    CONFIG_FILE,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
    encode_config,
)
from plimsoll_api.units import parse_bytes
from plimsoll_operator.render import names
from plimsoll_operator.render.names import ENGINE, make_slot_names
from plimsoll_operator.render.paths import ReplicaLayout, SupervisorLayout, make_pod_layout


def make_supervisor_config(
    service: InferenceService, layout: ReplicaLayout | None = None, container: str = ENGINE
) -> SupervisorConfig:
    """Return the supervisor's configuration; without a UID, as in local mode, it has no slots."""
    at = layout or make_pod_layout(service)
    meta, spec = service.metadata, service.spec
    return SupervisorConfig(
        service=ServiceRef(name=meta.name, namespace=meta.namespace, uid=meta.uid),
        engine=EngineEndpoint(
            type=_get_adapter_type(spec.engine),
            admin_url=_make_admin_url(spec.engine, at),
            serving_url=f"{spec.engine.url_scheme}://127.0.0.1:{at.port}",
            model=service.served_name,
            container="" if layout else container,
        ),
        memory=_add_memory_limits(spec.memory, service),
        supervision=spec.supervision,
        slots=make_slot_names(meta.name, spec.supervision.max_unavailable) if meta.uid else (),
    )


def _get_adapter_type(engine: Engine) -> EngineType:
    return EngineType.PLIMSOLL if engine.admin_contract == "Plimsoll" else engine.type


PARTIAL_DEVICE_PATTERN = re.compile(
    r"\.shared$|/v(gpu|cuda|core|memory)|(gpu|dcu|[ms]lu|npu|xpu|ascend\w*)[\w.-]*(mem|core|perc|milli)"
    r"|gpu\.intel\.com/(memory|millicores)",
    re.IGNORECASE,
)
"""Pattern for resources that are only a part of a device: time-slicing and MPS of NVIDIA, and
those of HAMi, Volcano, Alibaba, Tencent, AWS and Intel."""
SHARING_LABELS = frozenset(
    {"cloud.google.com/gke-gpu-sharing-strategy", "nvidia.com/gpu.sharing-strategy"}
)
"""Labels with which GKE and NVIDIA mark nodes with shared devices; the value ``none`` means
unshared."""
SHARING_ANNOTATIONS = frozenset({"gpu-fraction", "gpu-memory"})
"""Annotations of the KAI scheduler and Run:ai that request part of a device."""


def shares_device(
    resources: Iterable[str],
    claims: Collection[str],
    pod: Mapping[str, Any],
    annotations: Collection[str] = (),
) -> bool:
    """Report whether other containers may use a container's devices, according to the manifest.

    ``resources`` and ``claims`` are the names of the container's resources and resourceClaims.
    Other pods may use a claim that is not from a template.
    """
    independent = {
        one.get("name")
        for one in _iterate_objects(pod, "resourceClaims")
        if one.get("resourceClaimName")
    }
    native = [
        one
        for one in _iterate_objects(pod, "initContainers")
        if one.get("restartPolicy") == "Always"
    ]
    users = (*_iterate_objects(pod, "containers"), *native)
    used = Counter(name for one in users for name in set(list_resource_claims(one)))
    return (
        any(PARTIAL_DEVICE_PATTERN.search(str(name)) for name in resources)
        or any(name in independent or used[name] > 1 for name in claims)
        or any(
            name in SHARING_LABELS and value != "none" for name, value in _iterate_node_labels(pod)
        )
        or not SHARING_ANNOTATIONS.isdisjoint(annotations)
    )


def _iterate_node_labels(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = pod.get("nodeSelector")
    yield from ((str(k), str(v)) for k, v in (found if isinstance(found, dict) else {}).items())
    for key in ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"):
        pod = pod.get(key) or {}
        if not isinstance(pod, dict):
            return
    for term in _iterate_objects(pod, "nodeSelectorTerms"):
        for one in _iterate_objects(term, "matchExpressions"):
            values = one.get("values")
            if one.get("operator") == "In" and isinstance(values, list):
                yield from ((str(one.get("key")), str(value)) for value in values)


def list_resource_claims(container: Mapping[str, Any]) -> list[str]:
    """Return the names of the resourceClaims that a container uses."""
    return [
        str(one.get("name")) for one in _iterate_objects(container.get("resources") or {}, "claims")
    ]


def _iterate_objects(owner: Mapping[str, Any], field: str) -> Iterator[Mapping[str, Any]]:
    listed = owner.get(field)
    yield from (
        one for one in (listed if isinstance(listed, list) else ()) if isinstance(one, dict)
    )


def _shares_device(service: InferenceService) -> bool:
    resources, template = service.spec.engine.resources, service.spec.pod_template or {}
    pod = template.get("spec") or {}
    annotations = (template.get("metadata") or {}).get("annotations") or ()
    claims = [
        name for one in _iterate_objects(pod, "containers") for name in list_resource_claims(one)
    ]
    return shares_device((*resources.limits, *resources.requests), claims, pod, annotations)


# An external engine has only its serving port.
def _make_admin_url(engine: Engine, layout: ReplicaLayout) -> str:
    is_plimsoll = _get_adapter_type(engine) is EngineType.PLIMSOLL
    if is_plimsoll:
        return f"http://127.0.0.1:{layout.admin_port}"
    return f"{engine.url_scheme}://127.0.0.1:{layout.port}"


# Missing limits come from the engine's resources.
def _add_memory_limits(memory: MemoryPolicy, service: InferenceService) -> MemoryPolicy:
    return replace(
        memory,
        host=_add_memory_limit(memory.host, service.spec.engine.resources.limits.get("memory")),
        shared_device=memory.shared_device or _shares_device(service),
    )


def _add_memory_limit(budget: MemoryBudget | None, limit: str | None) -> MemoryBudget | None:
    if budget is None or limit is None or budget.limit_bytes is not None:
        return budget
    return replace(budget, limit_bytes=parse_bytes(limit))


def make_supervisor_args(layout: SupervisorLayout) -> list[str]:
    """Return the arguments of the supervisor's command."""
    return [
        f"--config={layout.config_file}",
        f"--run-dir={layout.run_dir}",
        f"--state-dir={layout.state_dir}",
        f"--metrics-port={layout.metrics_port}",
        f"--probe-port={layout.probe_port}",
        f"--host={layout.host}",
    ]


def make_config_map(service: InferenceService, extra_files: Mapping[str, str]) -> dict[str, Any]:
    """Return the supervisors' ConfigMap; ``extra_files`` are further files by name."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.make_supervisor_name(service.metadata.name)},
        "data": {CONFIG_FILE: encode_config(make_supervisor_config(service)).decode()}
        | dict(extra_files),
    }
