"""Find the engine for ``plimsoll watch``: by URL, PID, container or systemd unit."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.engines import EngineType
from plimsoll_api.supervisor_config import EngineEndpoint, MainProcess
from plimsoll_api.units import parse_whole_number
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.local.plan import LOOPBACK_ADDRESS
from plimsoll_sidecar.act.adapters.external_profile import ENGINE_PROFILES
from plimsoll_sidecar.act.adapters.external_server import identify_engine_type
from plimsoll_sidecar.clients.http import HttpClient
from plimsoll_sidecar.signals.engine_processes import (
    WRAPPER_PROGRAMS,
    EngineFinder,
    EngineNotFoundError,
    get_default_port,
    has_helper_title,
    is_engine_command,
    read_port_option,
)
from plimsoll_sidecar.signals.process_table import (
    ProcessId,
    find_descendants,
    identify,
    iterate_ancestors,
    read_command_line,
    read_command_name,
    read_parent_pids,
)
from plimsoll_sidecar.signals.tcp_sockets import find_listening_ports

CONTAINER_RUNTIMES = ("docker", "podman", "nerdctl")
"""Container runtimes whose ``inspect`` has Docker's format."""
PORT_PROXIES = frozenset({"docker-proxy", "rootlessport", "rootlesskit", "slirp4netns", "pasta"})
"""Programs that listen on the published ports of containers and forward the connections."""
COMMAND_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 3.0
MAX_CONCURRENT_PORTS = 16
MAX_OUTPUT_BYTES = 4 << 20
KNOWN_ENGINE_TYPES = (EngineType.VLLM, EngineType.SGLANG)


@dataclass(frozen=True)
class SupervisedEngine:
    """Engine, and the name that its supervisor uses."""

    name: str
    endpoint: EngineEndpoint


def find_engine(target: str, port: int | None = None) -> SupervisedEngine:
    """Return the running engine that ``target`` names. Raises UsageError and RunError.

    If the engine listens on several ports, ``port`` selects one.
    """
    if "://" in target or re.fullmatch(r"[\w.-]+:\d+", target):
        return _find_engine_by_url(target if "://" in target else f"http://{target}")
    if target.isdigit():
        return _find_engine_by_pid(int(target), port)
    if target.endswith(".service"):
        found = _find_engine_by_pid(_read_main_pid(target), port)
        return SupervisedEngine(_make_safe_name(target.removesuffix(".service")), found.endpoint)
    return _find_engine_by_container(target, port)


def find_engine_of_command(command: Sequence[str], port: int | None) -> SupervisedEngine:
    """Return the engine that ``command`` will start. Raises UsageError.

    Without ``port``, use the port in the command's arguments, or the engine type's default.
    """
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"{command[0]}: the program does not exist: check the path")
    kind = _detect_command_type(command)
    number = port or _parse_command_port(command, kind)
    if number is None:
        raise UsageError("watch: the port of the engine is unknown: add --port before the command")
    url = f"http://{LOOPBACK_ADDRESS}:{number}"
    name = _make_safe_name(f"{kind.value}-{number}")
    return SupervisedEngine(
        name, EngineEndpoint(kind, url, url, container=f"plimsoll-watch-{name}")
    )


def _find_engine_by_url(target: str) -> SupervisedEngine:
    try:
        parts = urlsplit(target)
        default = {"http": 80, "https": 443}[parts.scheme]
        port = parts.port or default
        host = parts.hostname or ""
    except (ValueError, KeyError):
        raise UsageError(f"{target}: write the URL as http://HOST:PORT") from None
    if not _is_local_address(host):
        raise UsageError(
            f"{target}: {host} is not an address of this machine: run plimsoll on the engine's"
            " machine, because the supervisor reads the memory of the engine's processes"
        )
    url = f"{parts.scheme}://{LOOPBACK_ADDRESS}:{port}"
    kind = _detect_server_type(url)
    if kind is None:
        raise RunError(
            f"{target}: no server answers at this address: start the engine first, or let plimsoll"
            " start it with --recover -- COMMAND"
        )
    try:
        main = EngineFinder(port, kind).find_processes().main
    except EngineNotFoundError:
        main = None
    if main is None:
        raise UsageError(
            f"{target}: cannot find the process that listens on this port: run plimsoll as the"
            " engine's user or as root, or specify the engine's container"
        )
    if read_command_name(main.pid) in PORT_PROXIES:
        raise UsageError(
            f"{target}: a container has published this port: specify the container instead"
        )
    return SupervisedEngine(_make_safe_name(f"{kind.value}-{port}"), EngineEndpoint(kind, url, url))


# ``addresses`` are the engine's possible base URLs, best first. If there are none, its listening
# ports on the loopback address are tried.
def _find_engine_by_pid(
    pid: int, port: int | None, addresses: Sequence[str] = ()
) -> SupervisedEngine:
    main = _find_main_process(pid)
    tree = read_parent_pids()
    everyone = [main.pid, *sorted(find_descendants({main.pid}, tree))]
    if not os.access(f"/proc/{main.pid}/fd", os.R_OK):
        raise UsageError(
            f"process {pid} belongs to another user: run plimsoll as that user or as root"
        )
    kind = _detect_command_type(read_command_line(main.pid))
    ports = find_listening_ports(everyone)
    if port is not None:
        ports = [port]
    if addresses:
        urls = [url for url in addresses if port is None or urlsplit(url).port == port]
        urls += [f"{url}:{one}" for url in addresses if urlsplit(url).port is None for one in ports]
        urls = [url for url in urls if urlsplit(url).port is not None]
    else:
        urls = [f"http://{LOOPBACK_ADDRESS}:{one}" for one in ports]
    expected = _parse_command_port(read_command_line(main.pid), kind)
    url, kind = _find_serving_url(urls, kind, expected)
    if not url and kind is not EngineType.CUSTOM:  # still starting
        url = f"http://{LOOPBACK_ADDRESS}:{expected}"
    endpoint = EngineEndpoint(
        kind, url, url, serves=bool(url), process=MainProcess(main.pid, main.started)
    )
    return SupervisedEngine(_make_safe_name(f"{read_command_name(main.pid)}-{main.pid}"), endpoint)


# ``pid`` may be the engine's main, child or wrapper process.
def _find_main_process(pid: int) -> ProcessId:
    tree = read_parent_pids()
    line = read_command_line(pid)
    if any(has_helper_title(line, kind) for kind in KNOWN_ENGINE_TYPES):
        above = list(iterate_ancestors(pid, tree))[1:]
        pid = next(
            (
                one
                for one in above
                if _detect_command_type(read_command_line(one)) in KNOWN_ENGINE_TYPES
            ),
            pid,
        )
    while read_command_name(pid) in WRAPPER_PROGRAMS:
        started = [child for child, parent in tree.items() if parent == pid]
        if len(started) != 1:
            break
        pid = started[0]
    found = identify(pid)
    if found is None:
        raise UsageError(f"process {pid} does not exist: check the PID")
    if pid in iterate_ancestors(os.getpid(), tree):
        raise UsageError(
            f"process {pid} is an ancestor of plimsoll itself: specify the PID of the engine"
        )
    return found


def _find_serving_url(
    urls: Sequence[str], kind: EngineType, preferred_port: int | None
) -> tuple[str, EngineType]:
    """Return the URL of the engine's API, and the type of the engine.

    URLs of a known engine type take precedence. If no URL answers, the returned URL is empty, and
    the type is ``kind``.
    """
    first = [url for url in urls if urlsplit(url).port == preferred_port]
    found: list[tuple[str, EngineType]] = []
    for group in (first, [url for url in urls if url not in first]):
        with ThreadPoolExecutor(MAX_CONCURRENT_PORTS) as pool:
            types = zip(group, pool.map(_detect_server_type, group), strict=True)
            found += [(url, seen) for url, seen in types if seen is not None]
        if known := [one for one in found if one[1] in KNOWN_ENGINE_TYPES]:
            return known[0]
    return (found[0][0], kind) if found else ("", kind)


def _detect_server_type(url: str) -> EngineType | None:
    """Return the type of the server at ``url``: CUSTOM if unknown, None without an answer."""
    server = HttpClient(url)
    kind = identify_engine_type(server)
    if kind is not None:
        return kind
    alive = server.responds_to_get(ENGINE_PROFILES[EngineType.CUSTOM].health_path, ANSWER_TIMEOUT_S)
    return EngineType.CUSTOM if alive else None


def _detect_command_type(line: Sequence[str]) -> EngineType:
    return next(
        (kind for kind in KNOWN_ENGINE_TYPES if is_engine_command(line, kind)), EngineType.CUSTOM
    )


def _parse_command_port(line: Sequence[str], kind: EngineType) -> int | None:
    return parse_whole_number(read_port_option(line) or "") or get_default_port(kind)


# The check tries to bind to the address.
def _is_local_address(host: str) -> bool:
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as one:
            try:
                one.bind(address)
            except OSError:
                continue
            return True
    return False


# The unit may be one of the system or of the user. Raises RunError.
def _read_main_pid(unit: str) -> int:
    for scope in ([], ["--user"]):
        output = _read_output(["systemctl", *scope, "show", "--property=MainPID", "--value", unit])
        pid = parse_whole_number((output or b"").decode(errors="replace").strip())
        if pid:
            return pid
    raise RunError(
        f"{unit}: no systemd unit with this name is running: check the name, or start the unit"
    )


class _ContainerState(msgspec.Struct, frozen=True, rename="pascal"):
    pid: int = 0


class _ContainerNetwork(msgspec.Struct, frozen=True, rename={"ip": "IPAddress"}):
    ip: str | None = None


class _PublishedPort(msgspec.Struct, frozen=True, rename="pascal"):
    host_ip: str = ""
    host_port: str = ""


class _NetworkSettings(msgspec.Struct, frozen=True, rename="pascal"):
    networks: dict[str, _ContainerNetwork] | None = None
    ports: dict[str, list[_PublishedPort] | None] | None = None


# The fields of ``docker inspect`` that this program uses.
class _ContainerInspection(msgspec.Struct, frozen=True, rename="pascal"):
    state: _ContainerState
    name: str = ""
    network_settings: _NetworkSettings = _NetworkSettings()

    # Published ports come first, then the container's own addresses.
    def list_addresses(self) -> list[str]:
        published = [
            f"http://{LOOPBACK_ADDRESS}:{one.host_port}"
            for key, many in sorted((self.network_settings.ports or {}).items())
            if key.endswith("/tcp")
            for one in many or ()
            if one.host_port.isdigit()
        ]
        networks = (self.network_settings.networks or {}).values()
        return list(dict.fromkeys(published)) + [f"http://{n.ip}" for n in networks if n.ip]


def _find_engine_by_container(target: str, port: int | None) -> SupervisedEngine:
    tried = [runtime for runtime in CONTAINER_RUNTIMES if shutil.which(runtime)]
    for runtime in tried:
        output = _read_output([runtime, "inspect", target])
        try:
            found = decode(output or b"[]", list[_ContainerInspection])
        except MalformedError:
            continue
        if found:
            break
    else:
        raise UsageError(
            f"{target}: not a URL, a PID, a systemd unit (NAME.service) or a container of"
            f" {', '.join(tried) or 'Docker, Podman or nerdctl, none of which is installed'}"
        )
    if found[0].state.pid <= 0:
        raise RunError(f"{target}: the container is not running: start it")
    pid = found[0].state.pid
    addresses = () if _is_in_same_network(pid) else found[0].list_addresses()
    return SupervisedEngine(
        _make_safe_name(target), _find_engine_by_pid(pid, port, addresses).endpoint
    )


def _is_in_same_network(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    except OSError:
        raise UsageError(
            f"process {pid} of the container belongs to another user: run plimsoll as root"
        ) from None


def _read_output(command: list[str]) -> bytes | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout[:MAX_OUTPUT_BYTES] if done.returncode == 0 else None


# The name must be valid for a folder and a pod.
def _make_safe_name(text: str) -> str:
    return re.sub(r"[^a-z0-9.-]+", "-", text.lower()).strip("-.")[:63] or "engine"
