"""Plan which objects of a policy to apply and to delete, in pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from plimsoll_api.engines import EngineType
from plimsoll_api.names import (
    API_GROUP,
    METRICS_PORT,
    POLICY_KIND,
    POLICY_LABEL,
    POLICY_PLURAL,
    SERVICE_LABEL,
    SLOT_REPLICAS_ANNOTATION,
    SLOT_ROLES_ANNOTATION,
    SLOT_WORKLOAD_ANNOTATION,
    make_policy_object_name,
)
from plimsoll_api.supervision_policy import SelectedEngineType, SupervisionPolicy
from plimsoll_api.supervisor_config import (
    CONFIG_FILE,
    EngineEndpoint,
    ServiceRef,
    SupervisorConfig,
    encode_config,
)
from plimsoll_api.workloads import (
    RAY_CLUSTER_LABEL,
    SlotOwner,
    WorkloadRef,
    make_members_service_name,
    make_ray_service_name,
    make_slot_names,
)
from plimsoll_operator.fleet.revisions import find_suspect_workloads
from plimsoll_operator.fleet.selected_pods import SelectedPod, SupervisionState
from plimsoll_operator.fleet.untrusted_text import make_printable_line
from plimsoll_operator.fleet.workloads import (
    MAX_WORKLOADS,
    Workload,
    choose_workloads_with_slots,
    find_slots_with_restarts,
    group_pods_by_slots,
    group_pods_by_workload,
    index_workload_statuses,
)
from plimsoll_operator.kinds import LEASE, Key, Object, Ref, get_owner_uid, make_ref
from plimsoll_operator.plans.service import Failure, list_held_slots
from plimsoll_operator.render.names import FIELD_MANAGER, MANAGED_BY_LABEL, add_owner
from plimsoll_operator.render.objects import (
    make_role_rule,
    make_supervisor_binding,
    make_supervisor_role,
)

MAX_SERVICE_ACCOUNTS = 100
MAX_SHOWN_CHARS = 320
MAX_LISTED_NAMES = 4


@dataclass(frozen=True)
class PolicyPlan:
    """Changes to make for a policy.

    The operator applies ``desired`` in this order, and then deletes ``surplus``. ``suspects`` are
    the workloads with a leaking revision. ``failure`` names a limit that the policy exceeds, or is
    None.
    """

    desired: list[Object]
    surplus: list[Object]
    workloads: list[Workload]
    suspects: dict[WorkloadRef, Object]
    failure: Failure | None = None


def make_plan(
    policy: SupervisionPolicy,
    owned: Mapping[Ref, Object],
    pods: Sequence[SelectedPod],
    incidents: Sequence[Object],
    now: str,
    status: Object | None = None,
    extra_files: Mapping[str, str] = MappingProxyType({}),
) -> PolicyPlan:
    """Plan which objects to apply, and which of the policy's objects to delete.

    ``status`` is the previous status, and ``now`` is RFC 3339. ``extra_files`` are further files
    for the supervisors' ConfigMap, by name.
    """
    uid, name = policy.metadata.uid, policy.metadata.name
    own = {where: item for where, item in owned.items() if get_owner_uid(item) == uid}
    leases = {where.name: item for where, item in own.items() if where.kind == LEASE.kind}
    held = list_held_slots(leases.values(), {one.name for one in pods})
    workloads = group_pods_by_workload(pods)
    sharing = group_pods_by_slots(pods, policy.spec.supervision.scope)
    chosen = choose_workloads_with_slots(name, sharing, leases)
    # Include terminating pods, whose supervisors still release slots and close incidents.
    accounts = sorted(
        {
            one.account
            for one in pods
            if one.may_hold_slot or one.state is SupervisionState.SUPERVISED
        }
    )
    desired = render_objects(policy, accounts[:MAX_SERVICE_ACCOUNTS], chosen, held, extra_files)
    wanted = {make_ref(one) for one in desired}
    idle = [item for slot, item in leases.items() if Ref(LEASE.kind, slot) not in wanted]
    kept = {
        *held,
        *find_slots_with_restarts(idle, policy.spec.supervision.restart_budget.window_s, now),
    }
    surplus = [
        item
        for where, item in own.items()
        if where not in wanted and not (where.kind == LEASE.kind and where.name in kept)
    ]
    return PolicyPlan(
        desired,
        surplus,
        workloads,
        find_suspect_workloads(workloads, incidents, index_workload_statuses(status or {})),
        find_account_failure(accounts) or find_slot_failure(sharing, chosen),
    )


def find_account_failure(accounts: Sequence[str]) -> Failure | None:
    """Return a failure if there are too many ServiceAccounts for a RoleBinding; None otherwise."""
    if len(accounts) <= MAX_SERVICE_ACCOUNTS:
        return None
    text = (
        f"the supervised pods use {len(accounts)} ServiceAccounts, but only the first"
        f" {MAX_SERVICE_ACCOUNTS} by name get permissions, so supervisors that run as"
        f" {accounts[MAX_SERVICE_ACCOUNTS]} or a later name cannot write incidents: use fewer"
        " accounts, or more policies"
    )
    return Failure("TooManyServiceAccounts", text, is_lasting=True)


def find_slot_failure(
    workloads: Sequence[Workload], with_slots: Sequence[Workload]
) -> Failure | None:
    """Return a failure if some workloads or pods cannot take a restart slot; None otherwise."""
    known = {(one.ref, one.role) for one in with_slots}
    without = [one for one in workloads if one.needs_slots and (one.ref, one.role) not in known]
    if without:
        who = join_names([format_workload_name(one.ref) for one in without])
        text = (
            f"the pods belong to {len(without) + len(with_slots)} workloads, but only"
            f" {MAX_WORKLOADS} get restart slots, so the supervisors of {who} cannot restart their"
            " replicas: use more policies"
        )
        return Failure("TooManyWorkloads", text, is_lasting=True)
    large = [format_workload_name(one.ref) for one in with_slots if one.is_truncated]
    if large:
        names = join_names(large)
        text = (
            f"{names}: the workload has too many pods, so some of them cannot take a restart slot:"
            " use more policies"
        )
        return Failure("TooManyPods", text, is_lasting=True)
    return None


def format_workload_name(ref: WorkloadRef | None) -> str:
    """Return the workload's name as a truncated, printable line, because it is untrusted."""
    return make_printable_line(str(ref), MAX_SHOWN_CHARS) if ref else "pods without an owner"


def join_names(names: Sequence[str]) -> str:
    """Join names for a message; a long list is shortened, such as ``a, b, c, d and 3 more``."""
    more = len(names) - MAX_LISTED_NAMES
    return ", ".join(names[:MAX_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")


REPORT_VERB = "report"
"""RBAC verb that permits a supervisor to write incidents and take slots. Only the admission
policies check it."""

DEFAULT_ENGINE_PORT = 8000


def make_key(policy: SupervisionPolicy) -> Key:
    """Return the key of the policy in the operator's queue."""
    return Key(policy.metadata.namespace, policy.metadata.name, POLICY_KIND)


def make_supervisor_config(policy: SupervisionPolicy) -> SupervisorConfig:
    """Return the configuration that the supervisors of all the policy's pods share.

    Each supervisor replaces ``engine`` with its own pod's engine.
    """
    meta, spec = policy.metadata, policy.spec
    url = f"http://127.0.0.1:{spec.engine.port or DEFAULT_ENGINE_PORT}"
    kind = spec.engine.type
    return SupervisorConfig(
        service=ServiceRef(meta.name, meta.namespace, meta.uid, POLICY_KIND),
        engine=EngineEndpoint(
            type=EngineType.CUSTOM if kind is SelectedEngineType.AUTO else EngineType(kind.value),
            admin_url=url,
            serving_url=url,
            container=spec.engine.container or "",
        ),
        memory=spec.memory,
        supervision=spec.supervision,
        slots=make_slot_names(meta.name, SlotOwner(), spec.supervision.max_unavailable)
        if meta.uid
        else (),
    )


def render_objects(
    policy: SupervisionPolicy,
    accounts: Collection[str],
    workloads: Sequence[Workload] = (),
    held_slots: Collection[str] = (),
    extra_files: Mapping[str, str] = MappingProxyType({}),
) -> list[Object]:
    """Return all objects of ``policy``, in the order of application.

    ``accounts`` are the ServiceAccounts of the supervised pods. ``workloads`` have slots, and
    ``held_slots`` are still held by a pod.
    """
    name = make_policy_object_name(policy.metadata.name)
    config: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {CONFIG_FILE: encode_config(make_supervisor_config(policy)).decode()}
        | dict(extra_files),
    }
    owners = list(workloads)
    if all(one.ref is not None for one in owners):
        owners.insert(0, Workload(None, "", ()))
    leases = [lease for one in owners for lease in _make_leases(policy, one)]
    slots = [one["metadata"]["name"] for one in leases]
    rights = [make_role(policy, (*slots, *sorted(set(held_slots) - set(slots))))]
    if accounts:
        rights.append(make_supervisor_binding(name, sorted(accounts), policy.metadata.namespace))
    services = [_make_ray_service(policy, ray) for one in workloads if (ray := one.ray_cluster)]
    if accounts:
        labels = {POLICY_LABEL: policy.metadata.name}
        services.append(
            _make_headless_service(make_members_service_name(policy.metadata.name), labels)
        )
    return [
        add_owner(item, POLICY_KIND, policy.metadata, _make_labels(policy))
        for item in (config, *leases, *rights, *services)
    ]


# The admission policy selects these Leases by their label. Only the pods in the annotation
# :data:`SLOT_REPLICAS_ANNOTATION` may take the slot.
def _make_leases(policy: SupervisionPolicy, workload: Workload) -> list[Object]:
    name = policy.metadata.name
    annotations = {SLOT_REPLICAS_ANNOTATION: workload.format_replicas()}
    if workload.ref is not None:
        annotations[SLOT_WORKLOAD_ANNOTATION] = str(workload.ref)
    if workload.roles:
        annotations[SLOT_ROLES_ANNOTATION] = workload.roles
    return [
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": slot,
                "labels": {SERVICE_LABEL: make_policy_object_name(name)},
                "annotations": annotations,
            },
        }
        for slot in workload.make_slot_names(name, policy.spec.supervision.max_unavailable)
    ]


# The head's supervisor reads the workers' addresses from it. KubeRay itself creates a Service
# only for the head.
def _make_ray_service(policy: SupervisionPolicy, cluster: str) -> Object:
    name = policy.metadata.name
    return _make_headless_service(
        make_ray_service_name(name, cluster), {POLICY_LABEL: name, RAY_CLUSTER_LABEL: cluster}
    )


# Pods are endpoints even before they are ready.
def _make_headless_service(name: str, labels: Object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "metrics", "port": METRICS_PORT, "protocol": "TCP"}],
        },
    }


def make_role(policy: SupervisionPolicy, slots: Collection[str]) -> Object:
    """Return the Role of the policy's supervisors."""
    name = policy.metadata.name
    report = make_role_rule(API_GROUP, [POLICY_PLURAL], [REPORT_VERB]) | {"resourceNames": [name]}
    return make_supervisor_role(make_policy_object_name(name), list(slots), report)


def _make_labels(policy: SupervisionPolicy) -> dict[str, str]:
    return {
        POLICY_LABEL: policy.metadata.name,
        MANAGED_BY_LABEL: FIELD_MANAGER,
        "app.kubernetes.io/name": "supervision-policy",
        "app.kubernetes.io/instance": policy.metadata.name,
    }
