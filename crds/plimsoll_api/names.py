"""Names that several parts share: API group, kinds, labels, annotations, files, ports."""

from __future__ import annotations

API_GROUP = "plimsoll.dev"
CRD_VERSION = "v1alpha1"
API_VERSION = f"{API_GROUP}/{CRD_VERSION}"

SERVICE_KIND, SERVICE_PLURAL, SERVICE_SHORT_NAME = "InferenceService", "inferenceservices", "plinf"
INCIDENT_KIND, INCIDENT_PLURAL, INCIDENT_SHORT_NAME = "LeakIncident", "leakincidents", "plinc"
POLICY_KIND, POLICY_PLURAL, POLICY_SHORT_NAME = "SupervisionPolicy", "supervisionpolicies", "plsp"

SERVICE_LABEL = f"{API_GROUP}/service"
"""Label on all objects of an InferenceService and on its incidents: the service's name."""

POLICY_LABEL = f"{API_GROUP}/policy"
"""Label on a policy's supervised pods, objects and incidents: the policy's name."""

REFUSED_ANNOTATION = f"{API_GROUP}/not-supervised"
"""Annotation of a pod that a policy selects but does not supervise: the reason."""

ROLE_LABEL = f"{API_GROUP}/role"
"""Label of a supervised pod: its role, where a value in the pod template takes precedence."""

REVISION_LABEL = f"{API_GROUP}/revision"
"""Label of a pod: hash of the spec for which the pod's template was first rendered."""

APPLIED_HASH_ANNOTATION = f"{API_GROUP}/applied-hash"
"""Annotation of an owned object: hash of the object as the operator applied it."""

POD_HASH_ANNOTATION = f"{API_GROUP}/pod-hash"
"""Annotation of an object: hash of the parts of the spec that affect pods."""

RESTART_ID_ANNOTATION = f"{API_GROUP}/restart-id"
"""Annotation of the Deployment: the ``restart.id`` that caused the last rolling restart."""

SERVICE_RESTARTS_ANNOTATION = f"{API_GROUP}/restarts"
"""Annotation of a slot Lease: the restarts of all replicas of the service."""

REPLICA_RESTARTS_ANNOTATION = f"{API_GROUP}/replica-restarts"
"""Annotation of a slot Lease: the restarts of each replica, by pod UID."""

SLOT_WORKLOAD_ANNOTATION = f"{API_GROUP}/workload"
"""Annotation of a policy's slot Lease: KIND/NAME of the workload."""

SLOT_REPLICAS_ANNOTATION = f"{API_GROUP}/replicas"
"""Annotation of a policy's slot Lease: the pods that may take the slot, by replica. An admission
policy enforces it."""

EXPECTED_REPLICAS_ANNOTATION = f"{API_GROUP}/expected-replicas"
"""Annotation of a slot Lease of a service with multi-node groups: the minimum number of replicas
that should be running."""

SLOT_ROLES_ANNOTATION = f"{API_GROUP}/roles"
"""Annotation of a policy's slot Lease: the pods of each role in the same graph."""

MAKE_CHECKPOINT_ANNOTATION = f"{API_GROUP}/make-checkpoint"
"""Annotation of a manifest in local mode: ``tiny`` generates the tiny checkpoint if it is
missing."""

OPERATOR_NAME = "plimsoll-operator"
"""Field manager of the operator, and holder of the slot Leases that it keeps closed."""

UNREADY_MANUAL, UNREADY_DRAIN, UNREADY_RESTART = "manual", "drain", "restart"
UNREADY_REASONS = (UNREADY_MANUAL, UNREADY_DRAIN, UNREADY_RESTART)
"""Reasons why a supervisor keeps its pod unready: a person drained the pod, an incident drains
it, or the engine restarts."""

TOKEN_FILE = "admin-token"

SUPERVISOR_MODULE, ASK_MODULE = "plimsoll_sidecar.launcher", "plimsoll_sidecar.ask"
"""Modules in the supervisor's container: the supervisor, and the program that runs an action for
a person and prints an :mod:`~plimsoll_api.action_answer`."""

RESTART_BUDGET_RESET_FILE = "reset-restart-budget"
"""File in the supervisor's state directory that requests a reset of the restart budget."""
ASK_SOCKET = "ask.sock"
"""Socket in the supervisor's state directory for actions by people."""

DEFAULT_DRAIN_S = 30.0
"""Default maximum duration of a drain, including a drain before a restart."""


def compute_action_limit_s(drain_s: float) -> float:
    """Return the timeout of a person's action with a drain of at most ``drain_s``.

    After the drain, a new worker may need ten minutes to load its weights.
    """
    return 2 * drain_s + 700.0


ENGINE_CONTAINER, SUPERVISOR_CONTAINER = "engine", "supervisor"

ADMIN_PORT, METRICS_PORT, PROBE_PORT = 8001, 9464, 9465
"""Ports in the pod: the engine's admin protocol, the supervisor's metrics, and its probe."""


def make_policy_object_name(policy: str) -> str:
    """Return the common name of a policy's ConfigMap, Role and RoleBinding.

    It contains a dot, so that no object of an InferenceService has it.
    """
    return f"{policy}.policy"
