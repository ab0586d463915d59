"""Find the container of a pod that runs the engine.

The strongest evidence is a command that starts its server, then the image's name, then options that
only an engine has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll_api.engines import EngineType
from plimsoll_operator.injection import command_line
from plimsoll_operator.injection.command_line import MAX_COMMAND_CHARS, CommandLine
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.listening import (
    KSERVE_CONTAINER,
    find_engine_address,
    find_mounted_scripts,
    resolve_variables,
)
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.programs import (
    NOT_SERVING_COMMANDS,
    ProgramClassification,
    classify_command,
    classify_image,
    find_option_value,
)
from plimsoll_operator.render.containers import list_native_sidecars
from plimsoll_operator.render.supervisor import list_resource_claims, shares_device

Object = dict[str, Any]

COMMAND_RANK, IMAGE_RANK, OPTIONS_RANK = 3, 2, 1
"""Ranks of the kinds of evidence for an engine; a higher rank is stronger."""
ENGINE_OPTION_PATTERNS = {
    EngineType.VLLM: re.compile(
        r"--(gpu[-_]memory[-_]utilization|max[-_]model[-_]len|max[-_]num[-_]seqs"
        r"|tensor[-_]parallel[-_]size|enable[-_]prefix[-_]caching|max[-_]num[-_]batched[-_]tokens)"
    ),
    EngineType.SGLANG: re.compile(r"--(mem[-_]fraction[-_]static|chunked[-_]prefill[-_]size)"),
}
BACKEND_FLAGS = ("--backend", "--engine", "--kind", "--framework")
"""Options that select a server's engine, for example in KServe's huggingfaceserver."""
CLIENT_OPTION_PATTERN = re.compile(r"--(base[-_]url|url|endpoint|target|dataset|num[-_]prompts)\b")
"""Pattern for options of clients that send requests to a server."""
RAY_PORT_NAMES = frozenset({"gcs", "gcs-server", "redis", "dashboard"})


@dataclass(frozen=True)
class EngineContainer:
    """The container that runs the engine.

    Attributes:
        container: The name of the container.
        path: The path of the container in the document.
        limits: The resource limits of the container.
        user_id: The container's user ID; None if the manifest does not set it.
        is_hidden: Whether only a process with capabilities can inspect the engine.
        ``shm``: The mount at ``/dev/shm``; None if the container uses the pod's default.
        shares_device: Whether other containers may use the engine's devices.
        no_restart_reason: Why the kubelet does not restart the container; empty if it does.
        evidence: How the engine and its port were found.
        notes: Texts for the user about what the supervisor cannot observe.
        words: All words of the commands that the container runs, with known variables expanded.

    """

    container: str
    path: str
    type: EngineType
    scheme: str
    port: int
    model: str
    limits: dict[str, Any]
    user_id: int | None
    is_hidden: bool
    shm: Object | None = None
    shares_device: bool = False
    no_restart_reason: str = ""
    evidence: str = ""
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def limit(self) -> str | None:
        """Memory limit as written in the manifest; None if there is none."""
        memory = self.limits.get("memory")
        return None if memory is None else str(memory)


@dataclass(frozen=True)
class ContainerClassification:
    """Container and the engine that it appears to run.

    ``kind`` is None if the container appears to run no engine; ``reason`` may then say why.
    """

    container: Object
    kind: EngineType | None = None
    rank: int = 0
    evidence: str = ""
    reason: str = ""
    server: ProgramClassification = field(default_factory=ProgramClassification)
    line: CommandLine = field(default_factory=CommandLine)
    ray: bool = False


def classify_container(
    container: Object, scripts: Mapping[str, str] | None = None
) -> ContainerClassification:
    """Classify a container by its command, its image and its options.

    ``scripts`` maps the paths of files in the container to their texts.
    """
    line = command_line.parse_container(container, scripts)
    programs = [classify_command(words) for words in line.commands]
    servers = [one for one in programs if one.kind is not None]
    image, name = classify_image(str(container.get("image") or ""))
    ray = _starts_ray(container, line, name)
    if servers:
        server = next((one for one in servers if not one.no_port_reason), servers[0])
        return ContainerClassification(
            container,
            server.kind,
            COMMAND_RANK,
            f"recognized by its command {server.shown}",
            "",
            server,
            line,
        )
    others = [one.not_engine_reason for one in programs if one.not_engine_reason]
    if programs and len(others) == len(programs):
        return ContainerClassification(container, reason=others[-1], line=line)
    unknown = [
        words
        for words, one in zip(line.commands, programs, strict=True)
        if not one.not_engine_reason
    ]
    words = unknown[0] if unknown else []
    if words and words[0] in NOT_SERVING_COMMANDS and not container.get("command"):
        return ContainerClassification(
            container, reason=f"runs vllm {words[0]}, which serves no requests", line=line
        )
    server = ProgramClassification(words=words)
    model = container.get("modelFormat") or {}
    if (kind := _find_engine_for_format(str(model.get("name") or ""))) is not None:
        return ContainerClassification(
            container, kind, IMAGE_RANK, "recognized by its model format", "", server, line
        )
    if image is not None:
        return ContainerClassification(
            container, image, IMAGE_RANK, f"recognized by its image {name}", "", server, line, ray
        )
    if (kind := _classify_by_options(words)) is not None:
        return ContainerClassification(
            container, kind, OPTIONS_RANK, "recognized by its options", "", server, line
        )
    return ContainerClassification(container, line=line, server=server, ray=ray)


def _find_engine_for_format(name: str) -> EngineType | None:
    formats = {
        "vllm": EngineType.VLLM, "huggingface": EngineType.VLLM, "sglang": EngineType.SGLANG
    }  # fmt: skip
    return formats.get(name.lower())


def _classify_by_options(words: list[str]) -> EngineType | None:
    if any(CLIENT_OPTION_PATTERN.match(word) for word in words):
        return None
    for flag in BACKEND_FLAGS:
        value = find_option_value(words, flag)
        if value in (EngineType.VLLM, EngineType.SGLANG):
            return EngineType(value)
    for kind, pattern in ENGINE_OPTION_PATTERNS.items():
        if any(pattern.fullmatch(word.partition("=")[0]) for word in words):
            return kind
    return None


def _starts_ray(container: Object, line: CommandLine, image: str) -> bool:
    ports = {str(one.get("name")) for one in container.get("ports") or ()}
    runs = any(command_line.get_program_name(words[0]) == "ray" for words in line.commands)
    return runs or bool(ports & RAY_PORT_NAMES) or "ray" in re.split(r"[^a-z0-9]+", image)


def find_engine(
    pod: Object,
    location: str,
    options: InjectionOptions,
    worker: bool = False,
    ray: bool = False,
    annotations: Collection[str] = (),
) -> EngineContainer | None:
    """Return the engine in a pod spec; None if no container runs vLLM or SGLang.

    ``options`` may name the engine's container, type and port. ``location`` is the path of the pod
    spec, for messages. A ``worker`` of a group needs no port. ``ray`` is True if KubeRay starts Ray
    in the pod. Raises InjectionError.
    """
    kind, port = options.engine_type, options.engine.port
    chosen = _choose_container(pod, location, options)
    if chosen is None:
        return None
    if ray and chosen.rank < COMMAND_RANK:
        chosen = replace(chosen, ray=True)
    container = chosen.container
    native = any(one is container for one in list_native_sidecars(pod))
    path = f"{location}.{'initContainers' if native else 'containers'}[{container.get('name')}]"
    if command_line.count_command_chars(container) > MAX_COMMAND_CHARS:
        raise InjectionError(
            f"{path}: the engine's flags are unknown, because the command has more than"
            f" {MAX_COMMAND_CHARS} characters: move the script into a file of the image or into a"
            " ConfigMap"
        )
    type_ = kind or chosen.kind or EngineType.CUSTOM
    wanted = options.unrecognized or options.named_is_custom or kind is not None
    if type_ is EngineType.CUSTOM and not wanted:
        return None
    server = chosen.server
    if server.no_port_reason and port is None and not worker and type_ is not EngineType.CUSTOM:
        raise InjectionError(f"{path}: {server.shown}: {server.no_port_reason}")
    variables = {**chosen.line.variables, **resolve_variables(container, options.config_maps)}
    address = find_engine_address(container, server, type_, variables, path)
    number, by = (
        (port, options.fields.port) if port is not None else (address.port, address.evidence)
    )
    if chosen.ray and port is None:
        number, by = None, "the command starts only Ray, which uses the declared ports"
    if number is None and worker:
        number, by = 8000, "the default, because the command starts no server"
    if number is None:
        raise InjectionError(
            f"{path}: the engine's port is unknown ({by}): set it with {options.fields.port}"
        )
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    requested = (*limits, *(resources.get("requests") or ()))
    evidence = chosen.evidence if kind in (None, chosen.kind) else ""
    return EngineContainer(
        container=str(container["name"]),
        path=path,
        type=type_,
        scheme=address.scheme,
        port=number,
        model=address.model,
        limits=limits,
        user_id=_find_user_id(pod, container, location, path),
        is_hidden=_is_hidden_from_supervisor(pod, container),
        shm=_find_shm_mount(container),
        shares_device=shares_device(requested, list_resource_claims(container), pod, annotations),
        no_restart_reason="" if native else _find_no_restart_reason(pod),
        evidence=", ".join(filter(None, [evidence, f"port {number} from {by}"])),
        notes=address.notes,
        words=tuple(
            command_line.expand_variables(word, variables)
            for words in chosen.line.commands
            for word in words
        ),
    )


def describe_containers(pod: Object, options: InjectionOptions) -> str:
    """Return the names of the pod's containers and what they run, as text for a message."""
    listed = [
        (
            str(one.get("name")),
            classify_container(one, find_mounted_scripts(pod, one, options.config_maps)).reason,
        )
        for one in [*(pod.get("containers") or ()), *list_native_sidecars(pod)]
    ]
    return ", ".join(f"{name} {why}".rstrip() for name, why in listed) or "none"


def _find_no_restart_reason(pod: Object) -> str:
    policy = pod.get("restartPolicy")
    return f"restartPolicy: {policy}" if policy in ("Never", "OnFailure") else ""


def _find_shm_mount(container: Object) -> Object | None:
    mounts = container.get("volumeMounts") or []
    return next((one for one in mounts if one.get("mountPath") == "/dev/shm"), None)


def _choose_container(
    pod: Object, location: str, options: InjectionOptions
) -> ContainerClassification | None:
    containers: list[Object] = pod.get("containers") or []
    sidecars = list_native_sidecars(pod)
    listed = [str(one.get("name")) for one in (*containers, *sidecars)]
    known = [
        classify_container(one, find_mounted_scripts(pod, one, options.config_maps))
        for one in (*containers, *sidecars)
    ]
    if (named := options.engine.container) is not None:
        if named not in listed:
            raise InjectionError(
                f"{location}.containers: the pod has no container {named!r}: select one of"
                f" {', '.join(listed)}"
            )
        return known[listed.index(named)]
    mains = known[: len(containers)]
    # A sidecar counts as the engine only if no regular container does.
    engines = [one for one in mains if one.kind is not None] or [
        one for one in known if one.kind is not None
    ]
    if not engines and not options.unrecognized and options.engine_type is None:
        return None
    candidates = engines or mains
    best = [one for one in candidates if one.rank == max(each.rank for each in candidates)]
    kserve = [one for one in best if one.container.get("name") == KSERVE_CONTAINER]
    serving = [one for one in best if not one.server.no_port_reason]
    with_ports = [one for one in serving if one.container.get("ports")]
    for found in (kserve, best, serving, with_ports if engines else []):
        if len(found) == 1:
            return found[0]
    raise InjectionError(
        f"{location}.containers: several containers may be the engine: select one of"
        f" {', '.join(listed)} with {options.fields.container}"
    )


def _find_user_id(pod: Object, container: Object, location: str, path: str) -> int | None:
    for context, at in (
        (container.get("securityContext"), path),
        (pod.get("securityContext"), location),
    ):
        found = (context or {}).get("runAsUser")
        if found is None:
            continue
        if not isinstance(found, int) or found < 0:
            raise InjectionError(
                f"{at}.securityContext.runAsUser: {found!r} is not a valid user ID"
            )
        return found
    return None


# ptrace_may_access() in Linux requires every capability that the engine has. A root process has
# the runtime's default capabilities unless the container drops them.
def _is_hidden_from_supervisor(pod: Object, container: Object) -> bool:
    context = container.get("securityContext") or {}
    capabilities = context.get("capabilities") or {}
    if context.get("privileged") or capabilities.get("add"):
        return True
    dropped = "ALL" in [str(one).upper() for one in capabilities.get("drop") or []]
    uid = context.get("runAsUser", (pod.get("securityContext") or {}).get("runAsUser"))
    return uid in (None, 0) and not dropped
