"""Define the directories, addresses and ports of a replica, which are fixed in a pod.

Local mode passes its own :class:`ReplicaLayout` to the functions that render arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.listening import ALL_ADDRESSES
from plimsoll_api.names import ADMIN_PORT, METRICS_PORT, PROBE_PORT
from plimsoll_api.serving import ModelSource
from plimsoll_api.supervisor_config import CONFIG_FILE

RUN_DIR = "/run/plimsoll"
CONFIG_DIR = "/etc/plimsoll"
STATE_DIR = "/var/lib/plimsoll"
CACHE_DIR = "/var/cache/plimsoll"
CLAIM_DIR = "/mnt/model"
API_KEYS_DIR = "/etc/plimsoll-keys"
API_KEYS_FILE = "keys"
DEFAULT_REVISION = "main"
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, kw_only=True)
class SupervisorLayout:
    """Absolute paths and ports of a supervisor; ``host`` is also the address of the OpenAI API."""

    run_dir: str
    state_dir: str
    config_file: str
    host: str = ALL_ADDRESSES
    metrics_port: int = METRICS_PORT
    probe_port: int = PROBE_PORT


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout(SupervisorLayout):
    """Paths, addresses and ports of an engine and its supervisor."""

    model_dir: str
    port: int
    admin_port: int = ADMIN_PORT


POD_LAYOUT = SupervisorLayout(
    run_dir=RUN_DIR, state_dir=STATE_DIR, config_file=f"{CONFIG_DIR}/{CONFIG_FILE}"
)
"""Paths and ports of a supervisor in a pod, also in pods of other workloads."""

HOST_PORTS = range(21_000, 29_000)
"""Ports of supervisors in pods with host networking, below NodePorts and ephemeral ports."""
HOST_PORT_PAIR_COUNT = 3_989
"""Number of port pairs in :data:`HOST_PORTS`. It is prime, so that engine ports at round
distances map to different pairs."""


def make_host_network_layout(engine_port: int) -> SupervisorLayout:
    """Return the supervisor's paths and ports in a pod with host networking.

    The ports are derived from the engine's port, which no other pod on the node can use.
    """
    first = HOST_PORTS.start + 2 * (engine_port % HOST_PORT_PAIR_COUNT)
    return replace(POD_LAYOUT, metrics_port=first, probe_port=first + 1)


def parse_claim_uri(uri: str) -> tuple[str, str]:
    """Return the name of the claim in a ``pvc://`` URI, and the path within the claim."""
    name, _, path = uri.removeprefix("pvc://").partition("/")
    return name, path


def get_model_dir(model: ModelSource) -> str:
    """Return the path of the checkpoint's directory in the containers."""
    scheme, _, rest = model.uri.partition("://")
    if scheme == "file":
        return rest
    if scheme == "pvc":
        return str(PurePosixPath(CLAIM_DIR) / parse_claim_uri(model.uri)[1])
    if scheme == "s3":  # no organisation on the hub has a name with a leading underscore
        return str(PurePosixPath(CLAIM_DIR) / "_s3" / rest)
    # Use a directory per revision: services that share a cache may serve different revisions.
    revision = (model.revision or DEFAULT_REVISION).replace("/", "--")
    return str(PurePosixPath(CLAIM_DIR) / rest / revision)


def make_pod_layout(service: InferenceService) -> ReplicaLayout:
    """Return the paths, addresses and ports of a replica in a pod."""
    return ReplicaLayout(
        model_dir=get_model_dir(service.spec.model),
        run_dir=POD_LAYOUT.run_dir,
        state_dir=POD_LAYOUT.state_dir,
        config_file=POD_LAYOUT.config_file,
        port=service.spec.engine.port,
    )
