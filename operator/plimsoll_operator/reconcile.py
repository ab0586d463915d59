"""The decision: from an InferenceService and what was observed to what is applied and removed.

Pure: no cluster, no clock. The same observation always gives the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.kinds import Object, Ref, owner_uid, ref
from plimsoll_operator.render import Images, names, render
from plimsoll_operator.render.deployment import pod_hash

ENDED = frozenset({"Resolved", "Unresolved", "Suppressed"})


class InvalidSpec(ValueError):
    """The spec cannot be rendered. The message names each field."""


@dataclass(frozen=True)
class Plan:
    """``desired`` in the order of application; ``surplus`` is removed afterwards."""

    desired: list[Object]
    surplus: list[Object] = field(default_factory=list)


def parse(item: Object) -> InferenceService:
    """The typed service; :class:`InvalidSpec` where it does not mean anything.

    The API server refuses such specs by schema and CEL, except those stored before an upgrade.
    """
    without_status = {key: value for key, value in item.items() if key != "status"}
    try:
        return InferenceService.model_validate(without_status)
    except ValidationError as error:
        problems = (
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_url=False, include_input=False)
        )
        raise InvalidSpec("; ".join(problems)) from None


def revision_ref(service: InferenceService) -> Ref:
    """Where the pinned pod template of the present spec is kept."""
    name = names.revision(service.metadata.name, pod_hash(service))
    return Ref("ControllerRevision", name)


def reconcile(
    service: InferenceService,
    owned: Mapping[Ref, Object],
    pods: list[Object],
    incidents: list[Object],
    images: Images,
    kept_incidents: int,
) -> Plan:
    """What there should be, and what of the service's own objects should not be there any more."""
    revision = owned.get(revision_ref(service))
    mine = revision is not None and owner_uid(revision) == service.metadata.uid
    pinned = revision["data"] if revision and mine else None
    present = {pod["metadata"]["name"] for pod in pods}
    held = [where.name for where, item in owned.items() if _held(item, present)]
    try:
        desired = render(service, images, pinned, held)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if service.spec.pod_template is None:
            raise
        # Its schema is open: what is no pod template at all shows here, the rest to the server.
        raise InvalidSpec(f"spec.podTemplate: this is not a pod template: {error}") from error
    wanted = {ref(item) for item in desired}
    surplus = [
        item
        for where, item in owned.items()
        if where not in wanted
        and owner_uid(item) == service.metadata.uid
        and where.name not in held
    ]
    return Plan(desired, surplus + _old_incidents(incidents, kept_incidents))


def _held(item: Object, pods: set[str]) -> bool:
    """A slot Lease whose holder still exists is in use, renewed or not: clocks are not compared."""
    return item["kind"] == "Lease" and (item.get("spec") or {}).get("holderIdentity") in pods


def _old_incidents(incidents: list[Object], kept: int) -> list[Object]:
    """The oldest ended incidents beyond ``kept``."""
    ended = [item for item in incidents if (item.get("status") or {}).get("phase") in ENDED]
    ended.sort(key=lambda item: item["metadata"].get("creationTimestamp") or "")
    return ended[: max(0, len(ended) - kept)]
