"""Names that several parts must agree on: API group, kinds, labels, annotations, files, ports."""

from __future__ import annotations

API_GROUP = "plimsoll.dev"
CRD_VERSION = "v1alpha1"
API_VERSION = f"{API_GROUP}/{CRD_VERSION}"

SERVICE_KIND, SERVICE_PLURAL, SERVICE_SHORT_NAME = "InferenceService", "inferenceservices", "plinf"
INCIDENT_KIND, INCIDENT_PLURAL, INCIDENT_SHORT_NAME = "LeakIncident", "leakincidents", "plinc"
POLICY_KIND, POLICY_PLURAL, POLICY_SHORT_NAME = "SupervisionPolicy", "supervisionpolicies", "plsp"

SERVICE_LABEL = f"{API_GROUP}/service"
"""On all objects of an InferenceService and on its incidents: its name."""

POLICY_LABEL = f"{API_GROUP}/policy"
"""On the pods that a SupervisionPolicy supervises, on the objects that the operator makes for it
and on its incidents: its name."""

REFUSED = f"{API_GROUP}/not-supervised"
"""Annotation of a pod that a SupervisionPolicy selects and that gets no supervisor: why not."""

REVISION_LABEL = f"{API_GROUP}/revision"
"""On pods: the hash of the spec that their template was first rendered for."""

APPLIED_HASH = f"{API_GROUP}/applied-hash"
"""Annotation: hash of the object as it was applied; differs when a field was removed from it."""

POD_HASH = f"{API_GROUP}/pod-hash"
"""Annotation: hash of the parts of the spec that concern pods; names the pinned revision."""

RESTART_ID = f"{API_GROUP}/restart-id"
"""Annotation of the Deployment: ``restart.id`` as it was last acted on."""

SERVICE_RESTARTS = f"{API_GROUP}/restarts"
"""Annotation of a slot Lease: the service's restarts, whichever replica they were of."""

REPLICA_RESTARTS = f"{API_GROUP}/replica-restarts"
"""Annotation of a slot Lease: the restarts of each replica, by the UID of its pod."""

SLOT_WORKLOAD = f"{API_GROUP}/workload"
"""Annotation of a slot Lease of a SupervisionPolicy: KIND/NAME of the workload whose slot it is."""

SLOT_REPLICAS = f"{API_GROUP}/replicas"
"""Annotation of a slot Lease of a SupervisionPolicy: the pods that may take it, by replica. An
admission policy holds supervisors to it."""

MAKE_CHECKPOINT = f"{API_GROUP}/make-checkpoint"
"""Annotation of a manifest in local mode: ``tiny`` makes the tiny checkpoint if the model's
directory does not exist."""

OPERATOR = "plimsoll-operator"
"""Field manager of the operator's writes, and holder of the slot Leases that it keeps taken."""

UNREADY_MANUAL, UNREADY_DRAIN, UNREADY_RESTART = "manual", "drain", "restart"
UNREADY_REASONS = (UNREADY_MANUAL, UNREADY_DRAIN, UNREADY_RESTART)
"""Why a supervisor keeps its pod out of service: a person drained it, an incident drains it, its
engine restarts. In ``/state`` and in the metric ``plimsoll_supervisor_out_of_service``."""

TOKEN_FILE = "admin-token"
"""File in the run directory with the admin protocol's bearer token: the supervisor writes it, the
engine reads it."""

SUPERVISOR_MODULE, ASK_MODULE = "plimsoll_sidecar.launcher", "plimsoll_sidecar.ask"
"""Programs in the supervisor's container, for ``python -m``: the supervisor itself, and the one
that carries out a person's action (and prints an :mod:`~plimsoll_api.action_answer`)."""

RESET_FILE = "reset-restart-budget"
"""In the supervisor's state directory: it resets its restart budget and removes the file."""
ASK_SOCKET = "ask.sock"
"""In the supervisor's state directory: where it takes the actions of persons."""

DRAIN_S = 30.0
"""Default limit of a drain, and of the drain before a restart."""


def action_limit_s(drain_s: float) -> float:
    """Seconds after which a person's action counts as unanswered, by the limit of its drain.

    After the drain, an external server may use up its own shutdown timeout. Then a worker may have
    to load its weights again, for up to ten minutes.
    """
    return 2 * drain_s + 700.0


ENGINE_CONTAINER, SUPERVISOR_CONTAINER = "engine", "supervisor"
"""Names of the containers in a pod of ours."""

ADMIN_PORT, METRICS_PORT, PROBE_PORT = 8001, 9464, 9465
"""Ports in the pod: the engine's admin protocol, the supervisor's metrics, its readiness probe."""


def object_name(policy: str) -> str:
    """Name of what the operator makes for a policy: its ConfigMap, Role and RoleBinding.

    No object of an InferenceService has a dot in its name.
    """
    return f"{policy}.policy"
