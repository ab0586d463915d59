"""Define the settings of a supervisor that is injected into a pod of another workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll_api.engines import EngineType
from plimsoll_api.label_selector import LabelSelector
from plimsoll_api.memory_policy import AUTO_BUDGET, MemoryPolicy, parse_growth_budget
from plimsoll_api.resources import Resources
from plimsoll_api.serving import SUPERVISOR_RESOURCES, SupervisorSettings
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervision_policy import SelectedEngine, SelectedEngineType, SupervisionPolicy

DEFAULT_MEMORY_POLICY = MemoryPolicy(host=parse_growth_budget(AUTO_BUDGET), warmup_s=300.0)
"""Memory policy of ``plimsoll inject`` without a SupervisionPolicy."""


@dataclass(frozen=True)
class OptionNames:
    """Names of the options in messages: flags of ``plimsoll inject``, or policy fields."""

    engine: str = "--engine"
    container: str = "--container"
    port: str = "--port"
    mode: str = "--mode Observe"
    unrecognized: str = "--container NAME or --all"
    exclude: str = "--name or --selector"
    group_restarts: str = "--allow-group-restarts"
    host_budget: str = "--host-budget"
    run_as_user: str = "--run-as-user"
    platform: str = "--platform openshift"
    probe: str = "--probe"
    resources: str = "--supervisor-requests and --supervisor-limits"
    selector: str = "--selector"


@dataclass(frozen=True)
class InjectionOptions:
    """Settings of an injection, in the types of a SupervisionPolicy.

    Attributes:
        image: The supervisor's image: the webhook takes it from ``config.py``, and ``plimsoll
            inject`` from ``--supervisor-image``.
        selector: The labels of the pods to inject; None selects all pods.
        namespace: The namespace of the workloads to inject; None allows all namespaces.
        resources: The supervisor's resources if ``supervisor`` sets none.
        pull_secrets: The image pull secrets if ``supervisor`` sets none.
        unrecognized: Whether to supervise engines of unknown types.
        named_is_custom: Whether the container that ``engine`` names may run a custom engine.
        group_restarts: Whether to accept workloads that recreate the whole group of pods when a
            container restarts.
        assigned_user: Whether the platform chooses the supervisor's user.
        config_maps: The data of the ConfigMaps that are in the same manifest, by name.
        runtimes: The specs of KServe's runtimes, by name.
        fields: The names of the options in messages.

    """

    image: str
    engine: SelectedEngine = field(default_factory=SelectedEngine)
    memory: MemoryPolicy = DEFAULT_MEMORY_POLICY
    supervision: Supervision = field(default_factory=Supervision)
    selector: LabelSelector | None = None
    namespace: str | None = None
    run_as_user: int | None = None
    supervisor: SupervisorSettings = field(default_factory=SupervisorSettings)
    resources: Resources = SUPERVISOR_RESOURCES
    pull_secrets: tuple[str, ...] = ()
    probe: bool = False
    probe_image: str | None = None
    token: bool = False
    unrecognized: bool = False
    named_is_custom: bool = True
    group_restarts: bool = False
    assigned_user: bool = False
    config_maps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    runtimes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    fields: OptionNames = OptionNames()

    @property
    def engine_type(self) -> EngineType | None:
        """Type of the engine; None if it is detected in each pod."""
        selected = self.engine.type
        return None if selected is SelectedEngineType.AUTO else EngineType(selected.value)

    @property
    def may_act(self) -> bool:
        """Whether the supervisor may take actions."""
        return self.supervision.mode is Mode.RECOVER


def make_options(
    policy: SupervisionPolicy, image: str, fields: OptionNames, namespace: str | None = None
) -> InjectionOptions:
    """Convert a policy to injection options; ``image`` is the supervisor's image."""
    spec = policy.spec
    return InjectionOptions(
        image=image,
        engine=spec.engine,
        memory=spec.memory,
        supervision=spec.supervision,
        selector=spec.selector,
        namespace=namespace,
        probe=spec.probe.enabled,
        supervisor=spec.supervisor,
        named_is_custom=False,
        fields=fields,
    )
