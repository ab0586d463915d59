"""Names that several parts must agree on: API group, kinds, labels, annotations, files, ports."""

from __future__ import annotations

API_GROUP = "plimsoll.dev"
CRD_VERSION = "v1alpha1"
API_VERSION = f"{API_GROUP}/{CRD_VERSION}"

SERVICE_KIND, SERVICE_PLURAL, SERVICE_SHORT_NAME = "InferenceService", "inferenceservices", "plinf"
INCIDENT_KIND, INCIDENT_PLURAL, INCIDENT_SHORT_NAME = "LeakIncident", "leakincidents", "plinc"
POLICY_KIND, POLICY_PLURAL, POLICY_SHORT_NAME = "SupervisionPolicy", "supervisionpolicies", "plsp"

SERVICE_LABEL = f"{API_GROUP}/service"
"""Label on all objects of an InferenceService and on its incidents: its name."""

POLICY_LABEL = f"{API_GROUP}/policy"
"""Label on the pods that a SupervisionPolicy supervises, on its objects and on its incidents: its
name."""

REFUSED = f"{API_GROUP}/not-supervised"
"""Annotation of a selected pod without a supervisor: why the SupervisionPolicy does not supervise
it."""

ROLE_LABEL = f"{API_GROUP}/role"
"""Label of a supervised pod: its role in disaggregated or multi-node serving. If the pod template
sets it, it takes precedence."""

REVISION_LABEL = f"{API_GROUP}/revision"
"""Label on pods: the hash of the spec that their template was first rendered for."""

APPLIED_HASH = f"{API_GROUP}/applied-hash"
"""Annotation: hash of the object as it was applied; it differs if a field was removed."""

POD_HASH = f"{API_GROUP}/pod-hash"
"""Annotation: hash of the parts of the spec that concern pods; part of the pinned revision's
name."""

RESTART_ID = f"{API_GROUP}/restart-id"
"""Annotation of the Deployment: the last ``restart.id`` that was acted on."""

SERVICE_RESTARTS = f"{API_GROUP}/restarts"
"""Annotation of a slot Lease: the restarts of the service, of any replica."""

REPLICA_RESTARTS = f"{API_GROUP}/replica-restarts"
"""Annotation of a slot Lease: the restarts of each replica, by the UID of its pod."""

SLOT_WORKLOAD = f"{API_GROUP}/workload"
"""Annotation of a slot Lease of a SupervisionPolicy: KIND/NAME of the workload whose slot it is."""

SLOT_REPLICAS = f"{API_GROUP}/replicas"
"""Annotation of a slot Lease of a SupervisionPolicy: the pods that may take it, by replica. An
admission policy enforces it."""

SLOT_ROLES = f"{API_GROUP}/roles"
"""Annotation of a slot Lease of a SupervisionPolicy: the pods of each role of the same graph."""

MAKE_CHECKPOINT = f"{API_GROUP}/make-checkpoint"
"""Annotation of a manifest in local mode: ``tiny`` makes the tiny checkpoint if the model's
directory does not exist."""

OPERATOR = "plimsoll-operator"
"""Field manager of the operator's writes, and holder of the slot Leases that it keeps closed."""

UNREADY_MANUAL, UNREADY_DRAIN, UNREADY_RESTART = "manual", "drain", "restart"
UNREADY_REASONS = (UNREADY_MANUAL, UNREADY_DRAIN, UNREADY_RESTART)
"""Reasons for which a supervisor keeps its pod unready: a person drained it, an incident drains it,
or its engine restarts. Used in ``/state`` and in the metric
``plimsoll_supervisor_out_of_service``."""

TOKEN_FILE = "admin-token"
"""File in the run directory with the bearer token of the admin protocol. The supervisor writes it,
the engine reads it."""

SUPERVISOR_MODULE, ASK_MODULE = "plimsoll_sidecar.launcher", "plimsoll_sidecar.ask"
"""Modules in the supervisor's container for ``python -m``: the supervisor itself, and the program
that carries out a person's action (and prints an :mod:`~plimsoll_api.action_answer`)."""

RESET_FILE = "reset-restart-budget"
"""File in the supervisor's state directory that resets its restart budget; the supervisor removes
it."""
ASK_SOCKET = "ask.sock"
"""Socket in the supervisor's state directory that accepts actions from people."""

DRAIN_S = 30.0
"""Default time limit of a drain, also before a restart, in seconds."""


def action_limit_s(drain_s: float) -> float:
    """Return the seconds after which a person's action counts as unanswered, from its drain limit.

    After the drain, an external server may use up its own shutdown timeout. A worker may then load
    its weights again, which takes up to ten minutes.
    """
    return 2 * drain_s + 700.0


ENGINE_CONTAINER, SUPERVISOR_CONTAINER = "engine", "supervisor"
"""Names of the containers in an InferenceService's pod."""

ADMIN_PORT, METRICS_PORT, PROBE_PORT = 8001, 9464, 9465
"""Ports in the pod: the engine's admin protocol, the supervisor's metrics, its readiness probe."""


def policy_object_name(policy: str) -> str:
    """Return the name of a policy's ConfigMap, Role and RoleBinding.

    No object of an InferenceService has a dot in its name.
    """
    return f"{policy}.policy"
