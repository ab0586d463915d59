"""Plan which objects of a service to apply and to delete, in pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from plimsoll_api.decoding import MAX_DEPTH
from plimsoll_api.incidents import ENDED_PHASES
from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import POD_HASH_ANNOTATION
from plimsoll_operator.fleet import revisions
from plimsoll_operator.fleet.pods import PodView
from plimsoll_operator.fleet.revisions import (
    LeakingRevision,
    RolloutDecision,
    diff_templates,
    find_suspect_revision,
    make_replica_pods,
)
from plimsoll_operator.injection.first_process import find_first_process_dependency
from plimsoll_operator.kinds import (
    InvalidSpecError,
    Object,
    Ref,
    get_owner_uid,
    make_ref,
    parse_object,
)
from plimsoll_operator.render import Images, model, names, render_objects
from plimsoll_operator.render.deployment import compute_pod_hash
from plimsoll_operator.render.groups import get_workload_kind_and_name
from plimsoll_operator.render.pod import make_base_template, make_pod_template
from plimsoll_operator.render.standard import PodSecurityError, check_pod_template

CLAIM_NAME_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class Failure:
    """Reason why the operator cannot apply a spec; if ``is_lasting``, a retry cannot help."""

    reason: str
    message: str
    is_lasting: bool


@dataclass(frozen=True)
class Plan:
    """Changes to make for a service.

    The operator applies ``desired`` in this order, and then deletes ``surplus``. ``changed``
    describes how a suspect revision differs from the last good one. ``dropped_fields`` are fields
    that the API server did not store.
    """

    desired: list[Object]
    surplus: list[Object]
    decision: RolloutDecision
    suspect: LeakingRevision | None
    changed: list[str]
    dropped_fields: tuple[str, ...] = ()


def parse_service(item: Object) -> InferenceService:
    """Parse an InferenceService. Raises :class:`InvalidSpecError`."""
    if _is_nested_deeper((item.get("spec") or {}).get("podTemplate"), MAX_DEPTH):
        raise InvalidSpecError(f"spec.podTemplate is nested more than {MAX_DEPTH} levels deep")
    return parse_object(InferenceService, item)


def _is_nested_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        inner = [one for one in level if isinstance(one, dict | list) and one]
        if not inner:
            return False
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return True


def make_plan(
    service: InferenceService,
    owned: Mapping[Ref, Object],
    pods: Sequence[PodView],
    incidents: list[Object],
    images: Images,
    status: Object | None = None,
    restricted: bool = True,
    extra_files: Mapping[str, str] = MappingProxyType({}),
    shared_claims: Collection[str] = (),
) -> Plan:
    """Plan which objects to apply, and which of the service's objects to delete.

    ``pods`` exclude terminating pods, and ``status`` is the previous status. If ``restricted``, the
    ``podTemplate`` must meet the restricted Pod Security Standard. ``shared_claims`` are the claims
    that pods on several nodes may mount. Raises :class:`InvalidSpecError`.
    """
    before = status or {}
    update = compute_pod_hash(service)
    templates = _find_pinned_templates(service, owned)
    suspect = find_suspect_revision(update, make_replica_pods(pods), incidents)
    running = _find_running_revision(service, owned)
    decision = revisions.decide_rollout(service, before, update, suspect, templates, running)
    instead = (
        None if decision.revision == update else (decision.revision, templates[decision.revision])
    )
    present = {pod.name for pod in pods}
    held = list_held_slots(owned.values(), present)
    pinned = templates.get(update)
    try:
        if restricted and service.spec.pod_template is not None:
            for worker in {False, service.spec.nodes > 1}:
                template = make_pod_template(service, images, worker)
                check_pod_template(service, template, make_base_template(service, images, worker))
        if pinned is None and (
            found := find_first_process_dependency(make_pod_template(service, images)["spec"])
        ):
            # a revision that is already running may continue
            raise InvalidSpecError(
                f"the pod's {found}, but the engine of a service is not process 1, because the"
                " containers share a process namespace: signal the engine by its name, or start it"
                " without an init system"
            )
        is_open = any(
            (one.get("status") or {}).get("phase") not in ENDED_PHASES for one in incidents
        )
        desired = render_objects(
            service,
            images,
            pinned,
            held,
            instead,
            decision.paused,
            extra_files,
            shared_claims,
            is_open,
        )
    except PodSecurityError as error:
        raise InvalidSpecError(str(error)) from None
    except InvalidSpecError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if service.spec.pod_template is None:
            raise
        # The schema is open: a malformed template fails only here. The API server checks the rest.
        raise InvalidSpecError(
            "spec.podTemplate: a field has a type that is not valid in a pod template: compare it"
            " with kubectl explain deployment.spec.template"
        ) from error
    known_revisions = before.get("revisions") or {}
    wanted = {make_ref(item) for item in desired}
    wanted |= {
        Ref("ControllerRevision", names.make_revision_name(service.metadata.name, revision))
        for revision in {update, running, *revisions.list_good_revisions(known_revisions)}
    }
    surplus = [
        item
        for where, item in owned.items()
        if where not in wanted
        and get_owner_uid(item) == service.metadata.uid
        and where.name not in held
    ]
    good = templates.get(
        revisions.find_rollback_revision(known_revisions, update, templates, running)
    )
    changed = diff_templates(good, pinned) if suspect and good and pinned else []
    return Plan(desired, surplus, decision, suspect, changed)


def list_claims(service: InferenceService) -> list[str]:
    """Return the names of the PersistentVolumeClaims in the spec; omit invalid ones."""
    template = service.spec.pod_template or {}
    spec = template.get("spec")
    listed = spec.get("volumes") if isinstance(spec, dict) else None
    sources = [
        one["persistentVolumeClaim"]
        for one in [
            *model.make_model_volumes(service),
            *(listed if isinstance(listed, list) else ()),
        ]
        if isinstance(one, dict) and isinstance(one.get("persistentVolumeClaim"), dict)
    ]
    return sorted(
        {name for one in sources if CLAIM_NAME_PATTERN.fullmatch(name := str(one.get("claimName")))}
    )


# For a Deployment, this is a pod template; for a LeaderWorkerSet, a group template.
def _find_pinned_templates(
    service: InferenceService, owned: Mapping[Ref, Object]
) -> dict[str, Any]:
    prefix = names.make_revision_name(service.metadata.name, "")
    return {
        where.name.removeprefix(prefix): item["data"]
        for where, item in owned.items()
        if where.kind == "ControllerRevision"
        and get_owner_uid(item) == service.metadata.uid
        and ("leaderTemplate" in item["data"]) == (service.spec.nodes > 1)
    }


def _find_running_revision(service: InferenceService, owned: Mapping[Ref, Object]) -> str:
    live = owned.get(Ref(*get_workload_kind_and_name(service))) or {"metadata": {}}
    return str((live["metadata"].get("annotations") or {}).get(POD_HASH_ANNOTATION, ""))


def list_held_slots(owned: Iterable[Object], pods: Collection[str]) -> list[str]:
    """Return the names of the slot Leases that one of the ``pods`` holds.

    The renewal time is ignored, because clocks of different machines may differ.
    """
    return [
        item["metadata"]["name"]
        for item in owned
        if item["kind"] == "Lease" and (item.get("spec") or {}).get("holderIdentity") in pods
    ]
