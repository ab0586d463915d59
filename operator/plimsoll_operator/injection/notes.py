"""Notes on an injected pod for a person: what the supervisor will not see, and what is missing."""

from __future__ import annotations

from typing import Any

from plimsoll_api.engines import EngineType
from plimsoll_api.supervision import Action
from plimsoll_operator.injection.engine import EngineContainer
from plimsoll_operator.injection.options import Options
from plimsoll_operator.render.containers import is_guaranteed, other_containers
from plimsoll_operator.render.paths import on_node

Object = dict[str, Any]


def notes(where: str, pod: Object, engine: EngineContainer, options: Options) -> list[str]:
    """Return the notes on an injection; each sentence begins with the pod's path."""
    known = engine.type is not EngineType.CUSTOM
    found = [describe_engine(engine)]
    found += engine.notes
    found += _user_notes(engine, options, known)
    if pod.get("hostNetwork"):
        at = on_node(engine.port)
        found.append(
            f"hostNetwork is true: ports {at.metrics_port} and {at.probe_port} must be free on the"
            " node; they follow from the engine's port, so engines with other ports can run there"
        )
    if engine.limit is None:
        found.append(
            "the engine has no memory limit: the forecast is of when the leak"
            " budget is spent, not of when the memory is"
        )
    secrets = {one.name for one in options.supervisor.image_pull_secrets} or options.pull_secrets
    if secrets and all(one.get("name") in secrets for one in pod.get("imagePullSecrets") or ()):
        found.append(
            "imagePullSecrets has the supervisor's alone, and Kubernetes adds those of the service"
            " account only to a pod with none: name there what the engine's image needs, too"
        )
    own = options.supervisor.resources
    if (
        own is not None
        and is_guaranteed(other_containers(pod))
        and not is_guaranteed([{"resources": vars(own)}])
    ):
        found.append(
            "the pod is no longer of the QoS class Guaranteed: the supervisor's requests and"
            f" limits differ or lack CPU or memory: omit {options.fields.resources} to keep it"
        )
    if not known:
        found.append(
            "the type of the engine is unknown: Plimsoll can watch and restart it, but not trim it"
        )
    if options.probe:
        found.append(
            "inject sets PYTHONPATH for the probe, which overrides a value in the image; to keep"
            " that value, set it in the container's env"
        )
    return [f"{where}: {one}" for one in [*found, *_mode_notes(options)]]


def describe_engine(engine: EngineContainer) -> str:
    """Describe the engine that was found, and the evidence."""
    return f"{engine.type.value} in container {engine.container}, {engine.evidence}"


def _user_notes(engine: EngineContainer, options: Options, known: bool) -> list[str]:
    found = []
    if options.assigned_user and engine.uid is None:
        found.append(
            "runAsUser is left to the platform: if it gives the supervisor another user than the"
            " engine, the supervisor cannot read the engine's memory or signal it"
        )
    elif engine.uid is None and options.run_as_user is None:
        found.append(
            "runAsUser is not set, so the supervisor runs as root, as the images of vLLM and SGLang"
            " do; if this image has another user, set it with"
            f" {options.fields.run_as_user}, and on OpenShift use --platform openshift"
        )
    if None not in (engine.uid, options.run_as_user) and engine.uid != options.run_as_user:
        found.append(
            f"the engine runs as user {engine.uid} and the supervisor as {options.run_as_user}: the"
            f" supervisor cannot see or signal it; omit {options.fields.run_as_user}"
        )
    elif engine.is_hidden and not known:
        found.append(
            "the engine runs as root with capabilities, so the supervisor cannot see its sockets"
            " and will not find it: set runAsUser, or drop all capabilities"
        )
    return found


def _mode_notes(options: Options) -> list[str]:
    """Return the limits of mode ``Recover`` without the operator."""
    if not options.may_act:
        return []
    found = [
        "mode Recover without the operator: replicas take no restart slots, so several of them may"
        " restart at once, and so may the only one; a SupervisionPolicy in the cluster gives slots"
    ]
    if Action.POD_REPLACE in options.supervision.ladder:
        found.append("PodReplace has no effect: only the operator evicts pods")
    return found
