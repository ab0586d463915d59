"""Find the address at which an engine listens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll_api import engines
from plimsoll_api.engines import EngineType
from plimsoll_api.units import MAX_WHOLE_NUMBER_DIGITS, parse_whole_number
from plimsoll_operator.injection.command_line import VARIABLE_REFERENCE_PATTERN, expand_variables
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.programs import (
    ProgramClassification,
    find_option_value,
    has_option,
)

Object = dict[str, Any]
ConfigMaps = Mapping[str, Mapping[str, Any]]
"""Map of a ConfigMap's name to its data."""

DEFAULT_PORTS = {EngineType.VLLM: 8000, EngineType.SGLANG: 30_000}
"""Default ports of the OpenAI-compatible servers (vllm serve, sglang.launch_server)."""
MAX_PORT = 65_535
KSERVE_CONTAINER = "kserve-container"
KSERVE_PORT = 8080
PORT_FLAGS = ("--port", "--http-port")
PORT_VARIABLES = ("PORT", "HTTP_PORT", "SERVER_PORT", "VLLM_PORT_NUMBER", "API_PORT")
"""Environment variables from which common start scripts read the engine's port."""
MODEL_FLAGS = ("--served-model-name", "--model-name", "--model", "--model-path", "--model-id")
PROBE_FIELDS = ("readinessProbe", "startupProbe", "livenessProbe")
POD_IP_PLACEHOLDER = "\0"
"""Placeholder for the pod's own IP address, which is unknown until the pod runs."""
OTHER_PORT_NAME_PATTERN = re.compile(
    r"(^|[-_])(prom|prometheus|metrics?|monitoring|exporter|nccl|gcs|dist|distributed|dashboard|ray"
    r"|client|grpc|rpc|redis|nixl|kv|zmq|zeromq|debug|debugpy|pprof|ssh|master|rdzv|torch|bootstrap"
    r"|gloo|side|sidecar|proxy|p2p|worker|admin|serve|events?|transfer|lmcache|mooncake)([-_]|\d*$)"
)
"""Pattern for names of ports at which the engine does not serve HTTP requests."""
HTTP_PORT_NAME_PATTERN = re.compile(
    r"http|api|openai|web|server|vllm|sglang|llm|inference|main|engine"
)
LOCAL_URL_PATTERN = re.compile(
    r"(https?)://(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\]):([0-9]{1,5})"
)
LOCAL_ADDRESSES = frozenset({"0.0.0.0", "::", "[::]", "127.0.0.1", "localhost", "::1", "", "*"})


@dataclass(frozen=True)
class EngineAddress:
    """Engine's address and model, the evidence for the port, and notes for the user.

    ``port`` is None if it is unknown; ``evidence`` then says why.
    """

    port: int | None
    evidence: str
    scheme: str
    model: str
    notes: tuple[str, ...] = ()


def resolve_variables(container: Object, config_maps: ConfigMaps) -> dict[str, str | None]:
    """Return a container's environment variables; a value is None if the manifest lacks it."""
    variables: dict[str, str | None] = {}
    for source in container.get("envFrom") or ():
        name = (source.get("configMapRef") or {}).get("name")
        for key, value in (config_maps.get(str(name)) or {}).items():
            variables[f"{source.get('prefix') or ''}{key}"] = str(value)
    for one in container.get("env") or ():
        value = one.get("value")
        source = one.get("valueFrom") or {}
        reference = source.get("configMapKeyRef") or {}
        if isinstance(reference, dict) and reference.get("name") in config_maps:
            value = config_maps[reference["name"]].get(str(reference.get("key")))
        field = source.get("fieldRef") or {}
        if isinstance(field, dict) and str(field.get("fieldPath")) in (
            "status.podIP",
            "status.podIPs",
        ):
            value = POD_IP_PLACEHOLDER
        variables[one["name"]] = None if source and value is None else str(value or "")
    return variables


def find_mounted_scripts(pod: Object, container: Object, config_maps: ConfigMaps) -> dict[str, str]:
    """Return the texts of a container's files that come from ``config_maps``, by path."""
    files: dict[str, str] = {}
    volumes = {one.get("name"): one for one in pod.get("volumes") or ()}
    for mount in container.get("volumeMounts") or () if config_maps else ():
        volume = volumes.get(mount.get("name")) or {}
        for source in (volume, *((volume.get("projected") or {}).get("sources") or ())):
            reference = source.get("configMap") or {}
            data = config_maps.get(str(reference.get("name"))) or {}
            items = reference.get("items") or ()
            paths = {one.get("key"): one.get("path") for one in items} or {key: key for key in data}
            for key, path in paths.items():
                if mount.get("subPath") in (None, path) and key in data:
                    folder = mount["mountPath"].rstrip("/")
                    file = folder if mount.get("subPath") else f"{folder}/{path}"
                    files[file] = str(data[key])
    return files


def find_engine_address(
    container: Object,
    server: ProgramClassification,
    kind: EngineType,
    variables: Mapping[str, str | None],
    path: str,
) -> EngineAddress:
    """Return the address at which the engine in ``container`` listens.

    ``server`` is the command that starts the engine. Raises InjectionError if the port is invalid.
    """
    words = [expand_variables(word, variables) for word in server.words]
    port, by = _find_port(container, words, server, kind, variables, path)
    scheme: str = engines.find_url_scheme(kind, words)
    for name in PROBE_FIELDS:
        request = (container.get(name) or {}).get("httpGet") or {}
        if str(request.get("scheme", "")).upper() == "HTTPS":
            scheme = "https"
    notes = tuple(_make_notes(container, words, server, kind, variables))
    return EngineAddress(port, by, scheme, _find_model(words), notes)


def _find_port(
    container: Object,
    words: Sequence[str],
    server: ProgramClassification,
    kind: EngineType,
    variables: Mapping[str, str | None],
    path: str,
) -> tuple[int | None, str]:
    unresolved = ""
    for flag in PORT_FLAGS:
        text = find_option_value(words, flag)
        number = None if text is None else parse_whole_number(text[:MAX_WHOLE_NUMBER_DIGITS])
        if number is not None:
            return _check_port(number, f"{path}: {flag}"), flag
        unresolved = unresolved or (f"{flag} {text}" if text is not None else "")
    if not server.shown and (found := _find_port_in_variables(variables)):
        return found
    if (found := _find_port_in_probes(container, path)) is not None:
        return found
    # An unknown program may listen on any port, or on none.
    known = server.shown != "" or not container.get("command")
    default = KSERVE_PORT if container.get("name") == KSERVE_CONTAINER else DEFAULT_PORTS.get(kind)
    if "huggingfaceserver" in server.shown:
        default = KSERVE_PORT
    if (found := _choose_declared_port(container, default, path)) is not None:
        return found
    if unresolved:
        return None, f"the value of {unresolved[:80]} is known only in the cluster"
    if known and default is not None:
        return default, "the default"
    return None, "no option, probe or port name contains it"


def _find_port_in_variables(variables: Mapping[str, str | None]) -> tuple[int, str] | None:
    for name in PORT_VARIABLES:
        number = parse_whole_number((variables.get(name) or "")[:MAX_WHOLE_NUMBER_DIGITS])
        if number is not None and 0 < number <= MAX_PORT:
            return number, f"the variable {name}"
    return None


def _find_port_in_probes(container: Object, path: str) -> tuple[int, str] | None:
    ports = {one.get("name"): one.get("containerPort") for one in container.get("ports") or ()}
    for name in PROBE_FIELDS:
        probe = container.get(name) or {}
        http_get = probe.get("httpGet") or {}
        port = http_get.get("port")
        port = (
            ports.get(port, parse_whole_number(port[:MAX_WHOLE_NUMBER_DIGITS]))
            if isinstance(port, str)
            else port
        )
        if port is not None:
            return _check_port(port, f"{path}.{name}.httpGet.port"), f"the {name}"
        command = " ".join(map(str, (probe.get("exec") or {}).get("command") or ()))
        if (url := LOCAL_URL_PATTERN.search(command)) is not None:
            return _check_port(int(url[2]), f"{path}.{name}"), f"the {name}"
    return None


def _choose_declared_port(
    container: Object, default: int | None, path: str
) -> tuple[int, str] | None:
    """Return the engine's port among the declared ports, and the evidence; None if unclear."""
    listed = [
        (
            str(one.get("name") or ""),
            _check_port(one.get("containerPort"), f"{path}.ports[{at}].containerPort"),
        )
        for at, one in enumerate(container.get("ports") or ())
    ]
    usable = [
        (name, port) for name, port in listed if not OTHER_PORT_NAME_PATTERN.search(name.lower())
    ]
    http_ports = [
        (name, port) for name, port in usable if HTTP_PORT_NAME_PATTERN.search(name.lower())
    ]
    for name, port in http_ports:
        return port, f"the declared port {name}"
    if default is not None and default in [port for _, port in usable]:
        return default, "the declared ports"
    if len(usable) == 1:
        return usable[0][1], f"the declared port {usable[0][0]}".rstrip()
    return None


def _check_port(port: object, path: str) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= MAX_PORT:
        raise InjectionError(
            f"{path}: {port!r} is not a valid port number: use a number from 1 to {MAX_PORT}"
        )
    return port


def _find_model(words: Sequence[str]) -> str:
    named = [find_option_value(words, flag) for flag in MODEL_FLAGS]
    named += [
        words[at + 1]
        for at, word in enumerate(words[:-1])
        if word == "serve" and not words[at + 1].startswith("-")
    ]
    name = next(filter(None, named), "")
    # Omit a variable that only the cluster can resolve, and KServe's template for the name.
    return "" if VARIABLE_REFERENCE_PATTERN.search(name) or "{{" in name else name


def _make_notes(
    container: Object,
    words: Sequence[str],
    server: ProgramClassification,
    kind: EngineType,
    variables: Mapping[str, str | None],
) -> list[str]:
    """Return notes about options that hide the engine's state from the supervisor."""
    notes: list[str] = []
    host = find_option_value(words, "--host")
    if host is not None and host.strip() not in LOCAL_ADDRESSES:
        shown = "the pod's own address" if POD_IP_PLACEHOLDER in host else host[:80]
        notes.append(
            f"the engine listens only on {shown} (--host), but the supervisor queries 127.0.0.1"
            " for load, stalls and readiness: use --host 0.0.0.0"
        )
    if kind is EngineType.SGLANG and server.shown and not has_option(words, "--enable-metrics"):
        notes.append(
            "SGLang reports no load without --enable-metrics, so the supervisor detects no stalls"
            " and each drain waits until its deadline: add the option"
        )
    if kind is EngineType.VLLM and has_option(words, "--disable-log-stats"):
        notes.append(
            "the metrics are empty because of --disable-log-stats, so the supervisor cannot detect"
            " load or stalls: remove the option"
        )
    if find_option_value(words, "--ssl-cert-reqs") in ("1", "2") or has_option(
        words, "--enable-ssl-client-auth"
    ):
        notes.append(
            "the engine requires client certificates, which the supervisor does not have, so the"
            " supervisor cannot detect load or stalls: serve /metrics without client certificates,"
            " or use --engine custom"
        )
    if has_option(words, "--api-key") or "VLLM_API_KEY" in variables:
        notes.append(
            "the supervisor has no API key, so it queries only paths that need no key, such as"
            " /metrics and /health"
        )
    rank = find_option_value(words, "--node-rank")
    if rank is not None and not rank.isdigit():
        notes.append(
            "--node-rank differs between the pods, and pods of rank 1 and above serve no port, so"
            " their supervisors find no server: inject only the workload of rank 0, or use a"
            " policy with a LeaderWorkerSet"
        )
    return notes
