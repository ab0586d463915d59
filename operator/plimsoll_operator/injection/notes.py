"""Write notes that tell the user what was injected and which limits the supervisor has."""

from __future__ import annotations

from typing import Any

from plimsoll_api.engines import EngineType
from plimsoll_api.supervision import Action
from plimsoll_operator.injection.engine import EngineContainer
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.render.containers import is_guaranteed, list_other_containers
from plimsoll_operator.render.paths import make_host_network_layout

Object = dict[str, Any]


def make_notes(
    location: str, pod: Object, engine: EngineContainer, options: InjectionOptions
) -> list[str]:
    """Return the notes that ``plimsoll inject`` prints for an injected pod.

    Each begins with ``location``, the pod's path in the manifest.
    """
    known = engine.type is not EngineType.CUSTOM
    notes = [describe_engine(engine)]
    notes += engine.notes
    notes += _make_user_notes(engine, options, known)
    if pod.get("hostNetwork"):
        at = make_host_network_layout(engine.port)
        notes.append(
            f"with hostNetwork: true, the supervisor uses ports {at.metrics_port} and"
            f" {at.probe_port} of the node, which depend on the engine's port: use a different"
            " engine port for each engine on a node"
        )
    if engine.limit is None:
        notes.append(
            "the engine has no memory limit, so the supervisor can forecast when the leak budget"
            " is exhausted, but not when memory runs out: set a limit"
        )
    secrets = {one.name for one in options.supervisor.image_pull_secrets} or options.pull_secrets
    if secrets and all(one.get("name") in secrets for one in pod.get("imagePullSecrets") or ()):
        notes.append(
            "imagePullSecrets contains only the secrets of the supervisor, so Kubernetes does not"
            " add those of the service account: add the secrets for the engine's image"
        )
    resources = options.supervisor.resources
    if (
        resources is not None
        and is_guaranteed(list_other_containers(pod))
        and not is_guaranteed([{"resources": vars(resources)}])
    ):
        notes.append(
            "the pod loses the QoS class Guaranteed, because the supervisor's requests and limits"
            " for CPU and memory are not equal: to keep the class, omit"
            f" {options.fields.resources}"
        )
    if not known:
        notes.append(
            "the engine's type is unknown, so the supervisor can watch and restart the engine, but"
            " cannot trim it"
        )
    if options.probe:
        notes.append(
            "the probe sets PYTHONPATH and overrides the value in the image: to keep that value,"
            " set it in the container's env"
        )
    return [f"{location}: {one}" for one in [*notes, *_make_mode_notes(options)]]


def describe_engine(engine: EngineContainer) -> str:
    """Return text that names the detected engine, its container and the evidence."""
    return f"{engine.type.value} in container {engine.container}, {engine.evidence}"


def _make_user_notes(
    engine: EngineContainer, options: InjectionOptions, is_known: bool
) -> list[str]:
    notes = []
    if options.assigned_user and engine.user_id is None:
        notes.append(
            "the platform chooses runAsUser: if the supervisor and the engine get different users,"
            " the supervisor can neither read the engine's memory nor signal the engine"
        )
    elif engine.user_id is None and options.run_as_user is None:
        platform = f"; on OpenShift, use {options.fields.platform}"
        notes.append(
            "runAsUser is not set, so the supervisor runs as root, as do the images of vLLM and"
            " SGLang: if the engine's image has another user, set it with"
            f" {options.fields.run_as_user}{platform if options.fields.platform else ''}"
        )
    if None not in (engine.user_id, options.run_as_user) and engine.user_id != options.run_as_user:
        notes.append(
            f"the engine runs as user {engine.user_id} but the supervisor as {options.run_as_user},"
            " so the supervisor cannot inspect or signal the engine: omit "
            f"{options.fields.run_as_user}"
        )
    elif engine.is_hidden and not is_known:
        notes.append(
            "the engine runs as root with capabilities, so the supervisor cannot read the engine's"
            " sockets and does not find the engine: set runAsUser, or drop all capabilities"
        )
    return notes


def _make_mode_notes(options: InjectionOptions) -> list[str]:
    if not options.may_act:
        return []
    notes = [
        (
            "in mode Recover without the operator, there are no restart slots, so all replicas may"
            " restart at the same time: use a SupervisionPolicy to get slots"
        )
    ]
    if Action.POD_REPLACE in options.supervision.ladder:
        notes.append("the action PodReplace has no effect, because only the operator evicts pods")
    return notes
