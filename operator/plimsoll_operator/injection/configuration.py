"""Build the ConfigMap of a supervisor that no operator manages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from plimsoll_api.roles import PodRole
from plimsoll_api.supervisor_config import (
    CONFIG_FILE,
    POD_ENGINE_ENV,
    EngineEndpoint,
    PodEngine,
    ServiceRef,
    SupervisorConfig,
    encode_config,
)
from plimsoll_operator.injection.checks import parse_memory_limit
from plimsoll_operator.injection.engine import EngineContainer
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.render import names

Object = dict[str, Any]


@dataclass(frozen=True)
class InjectedDocument:
    """Document with a supervisor, the supervisor's ConfigMap, and notes for the user.

    If the document is unchanged, ``config_map`` is None and ``notes`` say why. ``others`` are
    further new objects to which the document refers.
    """

    document: Object
    config_map: Object | None
    notes: tuple[str, ...]
    others: tuple[Object, ...] = ()


def make_config_map(
    name: str,
    namespace: object,
    engine: EngineContainer,
    options: InjectionOptions,
    role: PodRole | None = None,
) -> Object:
    """Build the ConfigMap of the supervisors in the workload ``name``.

    ``namespace`` is None if the manifest sets none.
    """
    config = _make_config(name, str(namespace or "default"), engine, options, role)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": make_metadata(names.make_supervisor_name(name), namespace),
        # Indented JSON is easier to review in a file.
        "data": {CONFIG_FILE: msgspec.json.format(encode_config(config), indent=2).decode() + "\n"},
    }


def make_metadata(name: str, namespace: object) -> Object:
    """Return an object's metadata. Omit ``namespace`` if it is None."""
    return {"name": name} | ({} if namespace is None else {"namespace": namespace})


def make_endpoint(engine: EngineContainer, name: str = "", serves: bool = True) -> EngineEndpoint:
    """Return the endpoint of ``engine``.

    ``name`` is the default for the model's name. ``serves`` is False for a multi-node worker.
    """
    url = f"{engine.scheme}://127.0.0.1:{engine.port}"
    return EngineEndpoint(
        type=engine.type,
        admin_url=url,
        serving_url=url,
        model=engine.model or name,
        container=engine.container,
        serves=serves,
    )


def make_pod_engine_variable(engine: PodEngine) -> Object:
    """Return the environment variable that describes a pod's engine to its supervisor."""
    text = msgspec.json.encode(engine, order="sorted").decode()
    # Kubernetes expands $(NAME) in values; $$ is a literal dollar sign.
    return {"name": POD_ENGINE_ENV, "value": text.replace("$", "$$")}


def _make_config(
    name: str,
    namespace: str,
    engine: EngineContainer,
    options: InjectionOptions,
    role: PodRole | None,
) -> SupervisorConfig:
    memory, host = options.memory, options.memory.host
    if host is not None:
        host = replace(host, limit_bytes=host.limit_bytes or parse_memory_limit(engine) or None)
    return SupervisorConfig(
        service=ServiceRef(name=name, namespace=namespace, role=role),
        engine=make_endpoint(engine, name),
        memory=replace(
            memory, host=host, shared_device=memory.shared_device or engine.shares_device
        ),
        supervision=options.supervision,
    )
