"""Configuration of a supervisor: one JSON file, mounted from a ConfigMap.

The operator or local mode writes it, and the supervisor reads it again after each change. Sizes are
in bytes and times in seconds.
"""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from plimsoll_api import decoding
from plimsoll_api.engines import EngineType
from plimsoll_api.manifest import PositiveBytes, PositiveSeconds
from plimsoll_api.memory_policy import MemoryPolicy
from plimsoll_api.names import SERVICE_KIND
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import Action, Mode, Supervision
from plimsoll_api.workloads import RAY_KIND, WorkloadRef, find_slot_owner, make_slot_names

CONFIG_FILE = "supervisor.json"
NODE_IP_ENV, DCGM_EXPORTER_PORT_ENV = "NODE_IP", "DCGM_EXPORTER_PORT"
AMD_EXPORTER_PORT_ENV = "AMD_EXPORTER_PORT"
"""Environment variables of the supervisor's container with the node's address and the exporters'
ports."""

CONTAINER_ENV = "PLIMSOLL_CONTAINER"
"""Environment variable of the engine's container with its name, by which the supervisor
recognizes the engine's processes."""

POD_ENGINE_ENV = "PLIMSOLL_ENGINE"
"""Environment variable of the supervisor's container with a :class:`PodEngine` as JSON: the
values that differ between the pods of a policy."""

GROUP_ENV = "PLIMSOLL_GROUP"
"""Environment variable of the supervisor's container in a multi-node group: a
:class:`GroupMember` as JSON."""

PROBE_DIR_ENV = "PLIMSOLL_PROBE_DIR"
"""Environment variable of both containers: the directory of the probes' sockets."""


class GroupMember(msgspec.Struct, frozen=True, omit_defaults=True):
    """Membership of a pod in a multi-node group. The group is one replica of its workload.

    Attributes:
        key: The ID of the group within the workload.
        worker: True for a worker of the group. False for the leader, which serves requests, and
            whose supervisor restarts the group.
        subdomain: The headless Service of the group's pods; empty if there is none.

    """

    key: Annotated[str, msgspec.Meta(max_length=63)] = msgspec.field(name="index")
    worker: bool = False
    subdomain: Annotated[str, msgspec.Meta(max_length=63)] = ""


class ServiceRef(msgspec.Struct, frozen=True):
    """InferenceService or SupervisionPolicy that a supervisor's pod belongs to.

    Attributes:
        uid: The UID of the object; empty in local mode.
        workload: The workload that owns a policy's pod.
        group: The pod's membership in a multi-node group.
        role: The pod's role in disaggregated or multi-node serving; None if it has none.

    """

    name: str
    namespace: str = "default"
    uid: str = ""
    kind: str = SERVICE_KIND
    workload: WorkloadRef | None = None
    group: GroupMember | None = None
    role: PodRole | None = None

    @property
    def is_worker(self) -> bool:
        """Whether the pod is a worker of its group, for which the leader's supervisor acts."""
        return self.group is not None and self.group.worker

    @property
    def is_in_ray_cluster(self) -> bool:
        """Whether the pod belongs to a RayCluster, which never recreates all pods of a group."""
        return self.workload is not None and self.workload.kind == RAY_KIND


class MainProcess(msgspec.Struct, frozen=True):
    """Process, identified by its PID and its start time in clock ticks since boot."""

    pid: int
    started: int


class EngineEndpoint(msgspec.Struct, frozen=True):
    """Addresses of the engine on the pod's loopback interface, and how to find its processes.

    Attributes:
        container: The value of :data:`CONTAINER_ENV` in the environment of the engine's processes;
            empty if they do not have this variable.
        serves: False for a worker of a multi-node engine, which serves no requests.
        process: The engine's main process, if a person specified it. Otherwise, the supervisor
            finds the main process itself.

    """

    type: EngineType
    admin_url: str
    serving_url: str
    model: str = ""
    version: str = ""
    container: str = ""
    serves: bool = True
    process: MainProcess | msgspec.UnsetType = msgspec.UNSET

    @property
    def pid(self) -> int | None:
        """PID of the specified main process; None if there is none."""
        return None if self.process is msgspec.UNSET else self.process.pid

    @property
    def admin_port(self) -> int:
        """Port of :attr:`admin_url`."""
        return urlsplit(self.admin_url).port or 80

    @property
    def serving_port(self) -> int:
        """Port of :attr:`serving_url`."""
        return urlsplit(self.serving_url).port or 80


class PodEngine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Engine of one pod, as admission detected it when the pod was created.

    Attributes:
        memory_limit_bytes: The memory limit of the engine's container; None if it has none.
        shared_device: Whether a device plugin gives the container only a part of a device.
        restarts: Whether the kubelet restarts the container after it terminates.
        graph: The object that creates all roles of disaggregated serving.

    """

    engine: EngineEndpoint
    workload: WorkloadRef | None = None
    group: GroupMember | None = None
    memory_limit_bytes: PositiveBytes | None = None
    shared_device: bool = False
    restarts: bool = True
    role: PodRole | None = None
    graph: WorkloadRef | None = None


class SupervisorConfig(msgspec.Struct, frozen=True):
    """Complete configuration of a supervisor.

    ``slots`` are the names of the slot Leases, of which the supervisor must hold one to restart its
    replica; empty in local mode.
    """

    service: ServiceRef
    engine: EngineEndpoint
    memory: MemoryPolicy = MemoryPolicy()
    supervision: Supervision = Supervision()
    slots: tuple[str, ...] = ()
    sample_interval_s: PositiveSeconds = 1.0


def make_pod_config(config: SupervisorConfig, pod: PodEngine) -> SupervisorConfig:
    """Return a policy's ``config`` with the engine, memory limit and slots of one pod.

    Actions that would not help the pod are removed. In a worker of a multi-node group, the
    supervisor only observes.
    """
    memory, host = config.memory, config.memory.host
    if host is not None and host.limit_bytes is None and pod.memory_limit_bytes is not None:
        # A budget above the limit would never be exhausted: the kernel would kill the engine first.
        growth = min(host.growth_bytes, pod.memory_limit_bytes)
        host = replace(host, growth_bytes=growth, limit_bytes=pod.memory_limit_bytes)
    shared = memory.shared_device or pod.shared_device
    useless: set[Action] = set()
    if pod.workload is None:  # nothing would recreate the pod
        useless |= {Action.POD_REPLACE}
    if not pod.restarts:  # if the engine ended, the pod would end, too
        useless |= {Action.WORKER_RESTART, Action.ENGINE_RESTART}
    ladder = tuple(action for action in config.supervision.ladder if action not in useless)
    recycle = config.supervision.recycle if set(ladder) - {Action.TRIM} else None
    supervision = replace(config.supervision, ladder=ladder, recycle=recycle, start_gate=None)
    service = replace(config.service, workload=pod.workload, group=pod.group, role=pod.role)
    owner = find_slot_owner(supervision.scope, pod.workload, pod.graph, pod.role)
    return _restrict_worker(
        replace(
            config,
            service=service,
            engine=pod.engine,
            memory=replace(memory, host=host, shared_device=shared),
            supervision=supervision,
            slots=make_slot_names(config.service.name, owner, len(config.slots)),
        )
    )


def make_member_config(config: SupervisorConfig, member: GroupMember) -> SupervisorConfig:
    """Return the configuration for one pod of a multi-node group of a service."""
    role = PodRole.WORKER if member.worker else PodRole.LEADER
    return _restrict_worker(
        replace(
            config,
            service=replace(config.service, group=member, role=role),
            engine=replace(config.engine, serves=not member.worker),
        )
    )


# The supervisor of a worker only observes.
def _restrict_worker(config: SupervisorConfig) -> SupervisorConfig:
    if not config.service.is_worker:
        return config
    supervision = replace(config.supervision, mode=Mode.OBSERVE, recycle=None)
    return replace(config, supervision=supervision, slots=())


def decode_config(data: bytes) -> SupervisorConfig:
    """Parse a configuration file. Raises :class:`~plimsoll_api.decoding.MalformedError` if invalid.

    Unknown fields are ignored, because the operator may be newer than the supervisor.
    """
    return decoding.decode(data, SupervisorConfig)


def encode_config(config: SupervisorConfig) -> bytes:
    """Return the content of a configuration file; equal configurations have equal content."""
    return msgspec.json.format(msgspec.json.encode(config, order="sorted"), indent=2) + b"\n"
