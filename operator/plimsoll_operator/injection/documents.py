"""Add a supervisor to each engine of a manifest document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from plimsoll_api.names import SERVICE_LABEL
from plimsoll_api.roles import find_role
from plimsoll_api.workloads import KSERVE_API
from plimsoll_operator.injection import kserve_llm
from plimsoll_operator.injection.checks import (
    check_engine,
    check_pod_fields,
    check_reserved_names,
    choose_supervisor_layout,
    find_supervisor,
)
from plimsoll_operator.injection.configuration import InjectedDocument, make_config_map
from plimsoll_operator.injection.engine import (
    EngineContainer,
    classify_container,
    describe_containers,
    find_engine,
)
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.notes import make_notes as notes_of
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.pods import (
    WORKERS_MESSAGE,
    PodSpec,
    list_containers,
    list_pod_specs,
)
from plimsoll_operator.injection.shape import check_types
from plimsoll_operator.injection.sidecar import add_supervisor, mark_supervisor_volumes
from plimsoll_operator.injection.unchanged import (
    explain_group_restart,
    explain_selector_mismatch,
    format_unchanged_note,
)
from plimsoll_operator.render import names
from plimsoll_operator.render.containers import list_all_containers

Object = dict[str, Any]
MAX_LABEL_CHARS = 63


def inject_document(document: Object, options: InjectionOptions) -> InjectedDocument:
    """Return a copy of ``document`` with a supervisor in each pod that runs an engine.

    Replace the supervisor of an earlier injection. Raises InjectionError.
    """
    changed = _copy_without_aliases(document)
    metadata = changed.get("metadata")
    meta: Object = metadata if isinstance(metadata, dict) else {}
    name = str(meta.get("name") or str(meta.get("generateName") or "engine").rstrip("-"))
    location = f"{changed.get('apiVersion')} {changed.get('kind')} {name}"
    namespace = meta.get("namespace")
    if options.namespace is not None and namespace not in (None, options.namespace):
        text = (
            f"the namespace of the document is {namespace}, but that of the policy is"
            f" {options.namespace}"
        )
        return InjectedDocument(document, None, (f"{location}: {format_unchanged_note(text)}",))
    _check_knative(changed, location)
    if kserve_llm.is_llm_service(changed):
        return kserve_llm.inject_llm_service(document, changed, options)
    injected: Object | None = None
    notes: list[str] = []
    pods = list_pod_specs(changed, location)
    if not pods and (reason := _explain_other_kind(changed, options)) is not None:
        return InjectedDocument(document, None, (f"{location}: {format_unchanged_note(reason)}",))
    for pod in pods:
        at = f"{location}: {pod.path}"
        engine = _find_engine(pod, at, options)
        if isinstance(engine, str):
            notes.append(f"{at}: {format_unchanged_note(engine)}")
            continue
        if not isinstance(pod.metadata.get("annotations") or {}, dict):
            raise InjectionError(f"{at}: the annotations of these pods must be an object")
        # At most one pod spec per document is not a worker's.
        add_supervisor(
            pod.spec,
            engine,
            options,
            names.make_supervisor_name(name),
            layout=choose_supervisor_layout(pod.spec, engine),
        )
        mark_supervisor_volumes(pod.metadata, pod.spec, pod.annotations)
        pod.labels[SERVICE_LABEL] = name[:MAX_LABEL_CHARS].rstrip("-.")
        role = find_role({**pod.inherited, **pod.labels}, engine.words)
        injected = make_config_map(name, namespace, engine, options, role)
        notes += notes_of(at, pod.spec, engine, options)
    if injected is None:
        return InjectedDocument(document, None, tuple(notes))
    return InjectedDocument(changed, injected, tuple(notes))


KNATIVE_MODES = ("serverless", "knative")
DEPLOYMENT_MODE_ANNOTATION = "serving.kserve.io/deploymentMode"


# Knative allows neither a shared process namespace nor init containers.
def _check_knative(document: Object, location: str) -> None:
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    metadata = document.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, dict) else None
    mode = annotations.get(DEPLOYMENT_MODE_ANNOTATION) if isinstance(annotations, dict) else None
    kserve = group == KSERVE_API and str(mode).lower() in KNATIVE_MODES
    if kserve or (group == "serving.knative.dev" and document.get("kind") == "Service"):
        instead = f"; set the annotation {DEPLOYMENT_MODE_ANNOTATION}: Standard" if kserve else ""
        raise InjectionError(
            f"{location}: Knative rejects shareProcessNamespace and init containers, which a"
            f" supervisor needs{instead}"
        )


def _explain_other_kind(document: Object, options: InjectionOptions) -> str | None:
    """Return why a document of an unsupported kind stays unchanged; None if it has no engine."""
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    if document.get("kind") in ("ConfigMap", "Secret") or not any(
        map(_has_engine, _iterate_pod_specs(document))
    ):
        return None
    if group == KSERVE_API:
        return (
            "the supervisor belongs in the service that uses this object: inject the service"
            " instead"
        )
    return (
        "plimsoll inject does not support pods of this kind: supervise them with a"
        " SupervisionPolicy, which selects the pods of any controller"
    )


def _iterate_pod_specs(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield value
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _iterate_pod_specs(one)


def _has_engine(pod: Object) -> bool:
    try:
        check_types(pod, "")
    except InjectionError:
        return False
    return any(classify_container(one).kind is not None for one in pod["containers"])


def _find_placeholder_image(pod: PodSpec) -> str | None:
    images = [str(one.get("image") or "") for one in list_all_containers(pod.spec)]
    return next((one for one in images if "{{" in one or "$" in one), None)


# Patches of kustomize contain no images.
def _is_patch(pod: PodSpec) -> bool:
    listed = pod.spec.get("containers")
    containers = listed if isinstance(listed, list) else []
    without_image = [one for one in containers if isinstance(one, dict) and not one.get("image")]
    return pod.needs_images and bool(without_image)


# YAML aliases refer to the same object, which the injection must not change twice.
def _copy_without_aliases(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_without_aliases(held) for key, held in value.items()}
    return [_copy_without_aliases(held) for held in value] if isinstance(value, list) else value


def _find_engine(pod: PodSpec, path: str, options: InjectionOptions) -> EngineContainer | str:
    """Return the engine in ``pod``, or the reason for leaving the pod unchanged.

    Raises InjectionError.
    """
    if pod.worker:
        return WORKERS_MESSAGE
    if (
        mismatch := explain_selector_mismatch({**pod.inherited, **pod.labels}, options)
    ) is not None:
        return mismatch
    check_types(pod.spec, path)
    if _is_patch(pod):
        return (
            "a container has no image: if the document is a patch, inject the output of kustomize"
            " build instead"
        )
    if (image := _find_placeholder_image(pod)) is not None:
        return (
            f"the image {image} is a placeholder: replace it first, for example with helm template"
            " or envsubst"
        )
    for name, runtime in options.runtimes.items():
        check_types(runtime, f"ServingRuntime {name}: spec")
    spec, containers = pod.spec, list_containers(pod.spec, options.runtimes)
    composed = {**spec, "containers": containers}
    engine = find_engine(composed, path, options, ray=pod.ray, annotations=pod.annotations)
    if engine is None:
        if pod.ray:
            return (
                "KubeRay starts Ray in the container, and no command starts an engine: if a Ray"
                f" application starts the engine, set {options.fields.engine},"
                f" {options.fields.container} and {options.fields.port}"
            )
        listed = describe_containers(composed, options)
        return (
            f"no container runs vLLM or SGLang (containers: {listed}): to supervise one of them as"
            f" a custom engine, use {options.fields.unrecognized}"
        )
    check_pod_fields(spec, path, options.fields)
    if pod.restarts_group and not options.group_restarts:
        raise InjectionError(f"{path}: {explain_group_restart(options, pod.restarts_group)}")
    if find_supervisor(spec) is None:
        check_reserved_names(spec, path)
    engine = replace(engine, no_restart_reason=engine.no_restart_reason or pod.no_restart_reason)
    check_engine(spec, containers, engine, path, options, choose_supervisor_layout(spec, engine))
    return engine
