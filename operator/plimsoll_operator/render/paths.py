"""Directories, addresses and ports of one replica.

In a pod, they are fixed (:func:`in_pod`). Local mode passes other :class:`ReplicaPlaces` to the
functions that render the engine's and the supervisor's arguments.
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
KEYS_DIR = "/etc/plimsoll-keys"
KEYS_FILE = "keys"
DEFAULT_REVISION = "main"
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, kw_only=True)
class SupervisorPlaces:
    """Paths and ports of a supervisor. Paths are absolute.

    ``host`` is the listen address of the supervisor and of the serving API of Plimsoll's engine.
    """

    run_dir: str
    state_dir: str
    config_file: str
    host: str = ALL_ADDRESSES
    metrics_port: int = METRICS_PORT
    probe_port: int = PROBE_PORT


@dataclass(frozen=True, kw_only=True)
class ReplicaPlaces(SupervisorPlaces):
    """Paths, addresses and ports of an engine and its supervisor."""

    model_dir: str
    port: int
    admin_port: int = ADMIN_PORT


SUPERVISED = SupervisorPlaces(
    run_dir=RUN_DIR, state_dir=STATE_DIR, config_file=f"{CONFIG_DIR}/{CONFIG_FILE}"
)
"""Paths and ports of a supervisor in a pod, including pods that the operator did not create."""

HOST_PORTS = range(21_000, 29_000)
"""Ports of supervisors in pods with host networking, below NodePorts and ephemeral ports."""
HOST_SLOTS = 3_989
"""Number of pairs of these ports. It is prime, so that engine ports at round distances map to
different pairs."""


def on_node(engine_port: int) -> SupervisorPlaces:
    """Return the supervisor's paths and ports in a pod with host networking.

    The ports are derived from the engine's port, which no other pod on the node can use.
    """
    first = HOST_PORTS.start + 2 * (engine_port % HOST_SLOTS)
    return replace(SUPERVISED, metrics_port=first, probe_port=first + 1)


def claim(uri: str) -> tuple[str, str]:
    """Return the claim name of a ``pvc://`` URI, and the path within the claim."""
    name, _, path = uri.removeprefix("pvc://").partition("/")
    return name, path


def model_dir(model: ModelSource) -> str:
    """Return the checkpoint's directory in the containers."""
    scheme, _, rest = model.uri.partition("://")
    if scheme == "file":
        return rest
    if scheme == "pvc":
        return str(PurePosixPath(CLAIM_DIR) / claim(model.uri)[1])
    if scheme == "s3":  # no organisation on the hub has a name with a leading underscore
        return str(PurePosixPath(CLAIM_DIR) / "_s3" / rest)
    # Use a directory per revision: services that share a cache may serve different revisions.
    revision = (model.revision or DEFAULT_REVISION).replace("/", "--")
    return str(PurePosixPath(CLAIM_DIR) / rest / revision)


def in_pod(service: InferenceService) -> ReplicaPlaces:
    """Return the paths and addresses of a replica in a pod."""
    return ReplicaPlaces(
        model_dir=model_dir(service.spec.model),
        run_dir=SUPERVISED.run_dir,
        state_dir=SUPERVISED.state_dir,
        config_file=SUPERVISED.config_file,
        port=service.spec.engine.port,
    )
