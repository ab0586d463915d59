"""Add a supervisor to KServe's LLMInferenceService, in a configuration of its own.

KServe merges a service's pods from presets, from the LLMInferenceServiceConfigs in ``baseRefs``,
and from the service. The injection therefore adds a configuration with the supervisor to
``baseRefs``. Unless the service sets a command, the engine is assumed to be the preset's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plimsoll_api.names import SERVICE_LABEL
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision_policy import SelectedEngineType
from plimsoll_api.supervisor_config import PodEngine
from plimsoll_api.workloads import (
    KSERVE_API,
    KSERVE_LLM_KIND,
    KSERVE_LLM_NAME_LABEL,
    PART_OF_KSERVE_LLM,
    PART_OF_LABEL,
)
from plimsoll_operator.injection.checks import (
    check_engine,
    check_pod_fields,
    check_reserved_names,
    choose_supervisor_layout,
    find_supervisor,
    parse_memory_limit,
)
from plimsoll_operator.injection.configuration import (
    InjectedDocument,
    make_config_map,
    make_endpoint,
    make_metadata,
    make_pod_engine_variable,
)
from plimsoll_operator.injection.engine import EngineContainer, find_engine
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.notes import make_notes as notes_of
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.pods import WORKERS_MESSAGE
from plimsoll_operator.injection.shape import check_types
from plimsoll_operator.injection.sidecar import add_supervisor, mark_supervisor_volumes
from plimsoll_operator.injection.unchanged import explain_selector_mismatch, format_unchanged_note
from plimsoll_operator.render import names
from plimsoll_operator.render.eviction import EVICTABLE_VOLUMES_ANNOTATION
from plimsoll_operator.render.probe import PYTHONPATH_ENV

Object = dict[str, Any]

CONFIG_KIND, SUPPORTED_VERSION = "LLMInferenceServiceConfig", "v1alpha2"
MAIN_CONTAINER = "main"
"""Name of the engine's container in KServe's presets."""
PRESET_PORT, PRESET_DECODE_PORT = 8000, 8001
"""Ports of the engine in the presets. In a decode pod, a proxy listens on port 8000."""
TLS_TEMPLATE = ".GlobalConfig.EnableTLS"
SCHEME_TEMPLATE = f"{{{{ if {TLS_TEMPLATE} }}}}https{{{{ else }}}}http{{{{ end }}}}"
"""Go template for the URL scheme, with the field by which KServe's presets enable TLS."""
MAX_LABEL_CHARS = 63


@dataclass(frozen=True)
class _Workload:
    """Part of a service's spec that describes its pods of one role; ``path`` is its location."""

    spec: Object
    path: str
    port: int
    role: PodRole


def is_llm_service(document: Object) -> bool:
    """Report whether ``document`` is an LLMInferenceService."""
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    return group == KSERVE_API and document.get("kind") == KSERVE_LLM_KIND


def inject_llm_service(
    document: Object, changed: Object, options: InjectionOptions
) -> InjectedDocument:
    """Return ``changed``, a copy of ``document``, with a configuration that adds the supervisor.

    Modify ``changed`` in place. If no pod can be supervised, return ``document`` instead. Raises
    InjectionError.
    """
    meta = changed.get("metadata")
    name = meta.get("name") if isinstance(meta, dict) else None
    location = f"{changed['apiVersion']} {KSERVE_LLM_KIND} {name}"
    if not isinstance(meta, dict) or not isinstance(name, str):
        raise InjectionError(f"{KSERVE_LLM_KIND}: metadata.name is required: set it")
    if changed["apiVersion"] != f"{KSERVE_API}/{SUPPORTED_VERSION}":
        raise InjectionError(
            f"{location}: apiVersion: {changed['apiVersion']} is not supported: use"
            f" {KSERVE_API}/{SUPPORTED_VERSION}"
        )
    spec = _get_object_field(changed, "spec", location)
    changed["spec"] = spec
    model = str(_get_object_field(spec, "model", f"{location}: spec").get("name") or name)
    merged: Object = {}
    notes: list[str] = []
    engines: list[EngineContainer] = []
    for workload in _list_workloads(spec, location):
        result = _add_supervisor(workload, name, model, options)
        if isinstance(result, str):
            notes.append(f"{workload.path}: {format_unchanged_note(result)}")
            continue
        engine, part = result
        engines.append(engine)
        if workload.spec is spec:
            merged |= part
        else:
            merged["prefill"] = part
        notes += notes_of(workload.path, _make_known_pod_spec(workload), engine, options)
        if workload.spec.get("worker") is not None:
            notes.append(f"{workload.path}.worker: {format_unchanged_note(WORKERS_MESSAGE)}")
    if not engines:
        return InjectedDocument(document, None, tuple(notes))
    config_name = names.make_supervisor_name(name)
    config = {
        "apiVersion": changed["apiVersion"],
        "kind": CONFIG_KIND,
        "metadata": make_metadata(config_name, meta.get("namespace")),
        "spec": merged,
    }
    refs = spec.get("baseRefs") or []
    if not isinstance(refs, list) or not all(isinstance(one, dict) for one in refs):
        raise InjectionError(f"{location}: spec.baseRefs must be a list of objects")
    # A later reference overrides an earlier one.
    spec["baseRefs"] = [
        *(one for one in refs if one.get("name") != config_name),
        {"name": config_name},
    ]
    first = replace(engines[0], scheme="http", model=model)
    return InjectedDocument(
        changed,
        make_config_map(name, meta.get("namespace"), first, options),
        tuple(notes),
        (config,),
    )


# A service with ``prefill`` has two kinds of pods.
def _list_workloads(spec: Object, location: str) -> list[_Workload]:
    at = f"{location}: spec"
    if spec.get("prefill") is None:
        return [_Workload(spec, at, PRESET_PORT, PodRole.BOTH)]
    prefill = _get_object_field(spec, "prefill", at)
    return [
        _Workload(spec, at, PRESET_DECODE_PORT, PodRole.DECODE),
        _Workload(prefill, f"{at}.prefill", PRESET_PORT, PodRole.PREFILL),
    ]


def _add_supervisor(
    workload: _Workload, name: str, model: str, options: InjectionOptions
) -> tuple[EngineContainer, Object] | str:
    """Return the engine and the configuration that adds its supervisor, or why there is none.

    Raises InjectionError.
    """
    labels = (
        _get_object_field(workload.spec, "labels", workload.path)
        if "labels" in workload.spec
        else {}
    )
    generated = {KSERVE_LLM_NAME_LABEL: name, PART_OF_LABEL: PART_OF_KSERVE_LLM}
    if (reason := explain_selector_mismatch({**generated, **labels}, options)) is not None:
        return reason
    if workload.spec.get("worker") is not None and not options.group_restarts:
        raise InjectionError(
            f"{workload.path}: KServe sets restartPolicy RecreateGroupOnPodRestart, which"
            " recreates the whole group whenever a container restarts, including the supervisor:"
            f" to accept this, use {options.fields.group_restarts}"
        )
    at = f"{workload.path}.template"
    check_types(_get_object_field(workload.spec, "template", workload.path), at)
    pod = _make_known_pod_spec(workload)
    annotations = _get_object_field(workload.spec, "annotations", workload.path)
    engine = _find_engine(pod, at, model, options, annotations)
    if engine is None:
        return (
            f"spec.template.containers[{MAIN_CONTAINER}].command runs neither vLLM nor SGLang: to"
            f" supervise it as a custom engine, use {options.fields.unrecognized}"
        )
    _check_python_path(pod, engine, options)
    check_pod_fields(pod, at, options.fields)
    if find_supervisor(pod) is None:
        check_reserved_names(pod, at)
    layout = choose_supervisor_layout(pod, engine)
    check_engine(pod, pod["containers"], engine, at, options, layout)
    info = PodEngine(
        engine=make_endpoint(engine),
        memory_limit_bytes=parse_memory_limit(engine) or None,
        shared_device=engine.shares_device,
        role=workload.role,
    )
    # The configuration contains only additions, but its port names must differ from the service's,
    # and the supervisor's resources depend on the engine's.
    container = next(one for one in pod["containers"] if one.get("name") == engine.container)
    kept = {key: container[key] for key in ("ports", "resources") if key in container}
    added: Object = {"containers": [{"name": engine.container, **kept}]}
    add_supervisor(
        added,
        engine,
        options,
        names.make_supervisor_name(name),
        (make_pod_engine_variable(info),),
        layout,
    )
    for key in kept:
        del added["containers"][0][key]
    part: Object = {
        "labels": {SERVICE_LABEL: name[:MAX_LABEL_CHARS].rstrip("-.")},
        "template": added,
    }
    # The service's own annotation would override that of the configuration.
    holder = workload.spec if EVICTABLE_VOLUMES_ANNOTATION in annotations else part
    mark_supervisor_volumes(holder, added)
    return engine, part


def _make_known_pod_spec(workload: _Workload) -> Object:
    """Return the part of the pod spec that is known: the service's fields and the preset's."""
    template = workload.spec.get("template")
    found: Object = template if isinstance(template, dict) else {}
    listed = list(found.get("containers") or [])
    if not any(one.get("name") == MAIN_CONTAINER for one in listed):
        listed.append({"name": MAIN_CONTAINER})
    return found | {
        "containers": [
            _apply_preset(one, workload.port) if one["name"] == MAIN_CONTAINER else one
            for one in listed
        ]
    }


def _apply_preset(container: Object, port: int) -> Object:
    security = {"runAsNonRoot": True, "capabilities": {"drop": ["ALL"]}}
    return {
        **container,
        "ports": container.get("ports") or [{"containerPort": port}],
        "securityContext": security | (container.get("securityContext") or {}),
    }


def _find_engine(
    pod: Object, path: str, model: str, options: InjectionOptions, annotations: Object
) -> EngineContainer | None:
    named = options.engine.container or MAIN_CONTAINER
    container: Object = next((one for one in pod["containers"] if one.get("name") == named), {})
    own_command = bool(container.get("command"))
    # The preset's engine is vLLM; only a container that the options name is a custom engine.
    preset: Object = {"container": named}
    if options.engine_type is None and not own_command:
        preset["type"] = SelectedEngineType.VLLM
    engine = find_engine(
        pod,
        path,
        replace(
            options,
            engine=options.engine.model_copy(update=preset),
            named_is_custom=options.engine.container is not None,
        ),
        annotations=annotations,
    )
    if engine is None:
        return None
    words = " ".join(map(str, [*(container.get("command") or ()), *(container.get("args") or ())]))
    templated = TLS_TEMPLATE in words or not own_command
    result = replace(engine, model=model)
    return replace(result, scheme=SCHEME_TEMPLATE) if templated else result


def _check_python_path(pod: Object, engine: EngineContainer, options: InjectionOptions) -> None:
    container = next(one for one in pod["containers"] if one.get("name") == engine.container)
    if options.probe and any(
        one.get("name") == PYTHONPATH_ENV for one in container.get("env") or ()
    ):
        raise InjectionError(
            f"{engine.path}.env[{PYTHONPATH_ENV}]: this variable would override the value that the"
            f" probe needs: remove the variable, or turn {options.fields.probe} off"
        )


def _get_object_field(owner: Object, key: str, location: str) -> Object:
    found = owner.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InjectionError(f"{location}.{key} must be an object")
    return found
