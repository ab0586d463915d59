"""Which container of a pod is the engine, which engine it is, and where it serves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll_api import engines
from plimsoll_api.engines import EngineType
from plimsoll_api.units import MAX_DIGITS, whole_number
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.render.supervisor import claims_of, shares_device

Object = dict[str, Any]

PORTS = {EngineType.VLLM: 8000, EngineType.SGLANG: 30_000, EngineType.CUSTOM: 8000}
"""Ports of the OpenAI servers where no flag names one (vllm serve, sglang.launch_server)."""
MAX_PORT = 65_535
MARKS = ((EngineType.VLLM, re.compile(r"\bvllm\b")), (EngineType.SGLANG, re.compile("sglang")))
ROUTER = re.compile(
    r"(^|/)(vllm-router|sglang-router|epp)$|\bdynamo\.frontend$|\b(vllm|sglang)_router\b"
)
ROUTER_IMAGE = re.compile(r"(^|[-_])(router|frontend|gateway|endpoint-picker)\b")
"""Programs and images of routers, whose names also say which engines they are for."""
NAMED = re.compile(r"--(backend|engine|kind|framework)[= ](?P<engine>vllm|sglang)")
"""Options that say which engine a server is, such as those of KServe's huggingfaceserver."""
FIRST_WORDS = 12
"""Of a command line: among them any word may be a program."""
MAX_COMMAND = 1 << 16
"""Characters of a container's command and arguments that are searched."""
LEXEME = re.compile(
    r"""(?P<space>[ \t\r\n]++) | (?P<plain>[^\s'"\\]++) | '(?P<single>[^']*+)'
    | "(?P<double>(?:[^"\\]++|\\.)*+)" | \\(?P<escaped>.) | (?P<other>\s)""",
    re.VERBOSE | re.DOTALL,
)
"""Parts of words of a shell script. No part of a text is looked at twice."""
ESCAPED = re.compile(r"\\([\\\"])")
SERVER = re.compile(r"(^|/)vllm$|vllm\.entrypoints\.|sglang\.launch_server")
SEPARATORS = ("&&", "||", ";", "|", "&")
KSERVE = "kserve-container"
KSERVE_PORT = 8080
MODEL_FLAGS = ("--served-model-name", "--served_model_name", "--model", "--model-path")
PORT_FLAGS = ("--port", "--http_port", "--http-port")


@dataclass(frozen=True)
class EngineContainer:
    """The engine's container.

    ``container`` is its name and ``path`` its place in the document; ``limits`` are its resource
    limits; ``uid`` is None where the manifest does not set it; ``hidden`` says whether only a
    process with capabilities may look into it; ``shm`` is what it mounts at /dev/shm, None where
    that is the pod's own. ``shares_device`` says whether others may use its devices.
    """

    container: str
    path: str
    type: EngineType
    scheme: str
    port: int
    model: str
    limits: dict[str, Any]
    uid: int | None
    hidden: bool
    shm: Object | None = None
    shares_device: bool = False

    @property
    def limit(self) -> str | None:
        """The memory limit as the manifest writes it; None where it has none."""
        found = self.limits.get("memory")
        return None if found is None else str(found)


def find(
    pod: Object,
    where: str,
    named: str | None = None,
    unrecognized: bool = False,
    field: str = "--container",
    kind: EngineType | None = None,
    port: int | None = None,
    named_is_custom: bool = True,
) -> EngineContainer | None:
    """Return the engine in a pod spec; None if no container runs vLLM or SGLang.

    With ``unrecognized``, a container that runs something else counts as a custom engine. So does
    a container that is ``named``, if ``named_is_custom``. ``where`` begins the message of an
    InjectionError: the document and the path of the pod spec. ``field`` is what a person names a
    container by. ``kind`` and ``port`` are the engine's where somebody says them.
    """
    containers: list[Object] = pod.get("containers") or []
    chosen = _choose(containers, where, named, unrecognized, field)
    if chosen is None:
        return None
    path = f"{where}.containers[{chosen.get('name')}]"
    if _command_length(chosen) > MAX_COMMAND:
        raise InjectionError(
            f"{path}: the command has more than {MAX_COMMAND} characters, so the engine's"
            " flags are unknown: move the script into a file of the image or a ConfigMap"
        )
    words = command_words(chosen)
    kind = kind or _type(chosen, words)
    if kind is EngineType.CUSTOM and not (unrecognized or named_is_custom):
        return None
    server = _server(words)
    limits = (chosen.get("resources") or {}).get("limits") or {}
    return EngineContainer(
        container=str(chosen["name"]),
        path=path,
        type=kind,
        scheme=_scheme(chosen, server, kind),
        port=port or _port(chosen, server, kind, path),
        model=_model(server),
        limits=limits,
        uid=_uid(pod, chosen, where, path),
        hidden=_hidden(pod, chosen),
        shm=_shm(chosen),
        shares_device=shares_device(limits, claims_of(chosen), pod),
    )


def names(pod: Object) -> str:
    """Return the names of the pod's containers as a list for a person."""
    return ", ".join(str(one.get("name")) for one in pod.get("containers") or []) or "none"


def _shm(container: Object) -> Object | None:
    mounts = container.get("volumeMounts") or []
    return next((one for one in mounts if one.get("mountPath") == "/dev/shm"), None)


def _choose(
    containers: list[Object], where: str, named: str | None, unrecognized: bool, field: str
) -> Object | None:
    listed = [str(one.get("name")) for one in containers]
    if named is not None:
        if named not in listed:
            raise InjectionError(
                f"{where}.containers: no container {named!r}: use one of {', '.join(listed)}"
            )
        return containers[listed.index(named)]
    known = [one for one in containers if _type(one, command_words(one)) is not EngineType.CUSTOM]
    if not known and not unrecognized:
        return None
    candidates = known or containers
    kserve = [one for one in candidates if one.get("name") == KSERVE]
    for found in (kserve, candidates):
        if len(found) == 1:
            return found[0]
    raise InjectionError(
        f"{where}.containers: which container is the engine? Use {field} with one of"
        f" {', '.join(listed)}"
    )


def command_words(container: Object) -> list[str]:
    """Command and arguments as words, also those within a ``sh -c`` script.

    What is beyond :data:`MAX_COMMAND` characters is left out, from the argument that it is in.
    """
    words: list[str] = []
    left = MAX_COMMAND
    for part in _command(container):
        left -= len(part)
        if left < 0:
            break
        words += _split(part.replace("\\\n", " "))
    return words


def _command(container: Object) -> Iterator[str]:
    for part in (*(container.get("command") or ()), *(container.get("args") or ())):
        yield str(part)


def _command_length(container: Object) -> int:
    return sum(map(len, _command(container)))


def _split(text: str) -> list[str]:
    """Split a script into words, in one pass: ``shlex`` takes the square of a word's length.

    What is between quotes is one word; a script whose quotes do not end is split at its spaces.
    """
    if not any(mark in text for mark in "'\"\\#"):
        return text.split()
    words: list[str] = []
    word: list[str] | None = None
    at = 0
    while at < len(text):
        found = LEXEME.match(text, at)
        if found is None:
            return text.split()
        at = found.end()
        kind, part = found.lastgroup, found[found.lastgroup or 0]
        if kind == "space":
            if word is not None:
                words.append("".join(word))
            word = None
        elif word is None and kind == "plain" and part.startswith("#"):
            line = text.find("\n", at)
            at = line if line >= 0 else len(text)
        else:
            word = [] if word is None else word
            word.append(ESCAPED.sub(r"\1", part) if kind == "double" else part)
    return [*words, "".join(word)] if word is not None else words


def _server(words: Sequence[str]) -> Sequence[str]:
    """Return the words of the server's own command.

    A script may start others before it, such as Ray.
    """
    begin = next((at for at, word in enumerate(words) if SERVER.search(word)), 0)
    end = next((at for at in range(begin, len(words)) if words[at] in SEPARATORS), len(words))
    return words[begin:end]


def _type(container: Object, words: Sequence[str]) -> EngineType:
    programs = list(_programs(words))
    if any(ROUTER.search(one) for one in programs):
        return EngineType.CUSTOM
    # That project publishes more than engines.
    image = str(container.get("image", "")).partition("@")[0].replace("vllm-project/", "")
    shown = [] if ROUTER_IMAGE.search(image.rpartition("/")[2]) else [image]
    text = " ".join([*shown, *programs])
    for kind, mark in MARKS:
        if mark.search(text):
            return kind
    if container.get("name") == KSERVE and "huggingface" in text:
        return EngineType.VLLM
    return EngineType.CUSTOM


def _programs(words: Sequence[str]) -> Iterator[str]:
    """Yield those words of a command line that may be programs, and engines that options name.

    A model, a path or a namespace may have any name, so other options and their values are left
    out.
    """
    value = False
    for at, word in enumerate(words):
        if named := NAMED.fullmatch(" ".join(words[at : at + 2]) if "=" not in word else word):
            yield named["engine"]
        option = word.startswith("-")
        # A long script may come before the server.
        if not option and not value and (at < FIRST_WORDS or SERVER.search(word)):
            yield word
        value = (word.startswith("--") and "=" not in word) or word == "serve"


def _scheme(container: Object, words: Sequence[str], kind: EngineType) -> str:
    """Return the scheme by the flags of a known engine, or by the probes of another one."""
    if kind is not EngineType.CUSTOM:
        return engines.scheme(kind, words)
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        request = (container.get(probe) or {}).get("httpGet") or {}
        if "scheme" in request:
            return str(request["scheme"]).lower()
    return "http"


def _port(container: Object, words: Sequence[str], kind: EngineType, path: str) -> int:
    for flag in PORT_FLAGS:
        found = _flag(words, flag)
        # A reference to a variable is not resolved here; the container's port says the same.
        number = None if found is None else whole_number(found[:MAX_DIGITS])
        if number is not None:
            return _checked(number, f"{path}: {flag}")
    ports = container.get("ports") or []
    if ports:
        declared = ports[0].get("containerPort") if isinstance(ports[0], dict) else None
        return _checked(declared, f"{path}.ports[0].containerPort")
    return KSERVE_PORT if container.get("name") == KSERVE else PORTS[kind]


def _checked(port: object, where: str) -> int:
    if not isinstance(port, int) or not 0 < port <= MAX_PORT:
        raise InjectionError(f"{where}: {port!r} is not a port number from 1 to {MAX_PORT}")
    return port


def _model(words: Sequence[str]) -> str:
    for flag in MODEL_FLAGS:
        found = _flag(words, flag)
        if found is not None:
            return found
    for at, word in enumerate(words[:-1]):
        if word == "serve" and not words[at + 1].startswith("-"):
            return words[at + 1]
    return ""


def _flag(words: Sequence[str], name: str) -> str | None:
    for at, word in enumerate(words):
        if word.startswith(name + "="):
            return word.partition("=")[2]
        if word == name and at + 1 < len(words):
            return words[at + 1]
    return None


def _uid(pod: Object, container: Object, where: str, path: str) -> int | None:
    for context, at in (
        (container.get("securityContext"), path),
        (pod.get("securityContext"), where),
    ):
        found = (context or {}).get("runAsUser")
        if found is None:
            continue
        if not isinstance(found, int) or found < 0:
            raise InjectionError(f"{at}.securityContext.runAsUser: {found!r} is not a user ID")
        return found
    return None


def _hidden(pod: Object, container: Object) -> bool:
    """Whether the kernel hides sockets and environment from a process without capabilities.

    ptrace_may_access(): the reader needs every capability that the process has. A process of
    root has the runtime's default set unless the container drops it.
    """
    context = container.get("securityContext") or {}
    capabilities = context.get("capabilities") or {}
    if context.get("privileged") or capabilities.get("add"):
        return True
    dropped = "ALL" in [str(one).upper() for one in capabilities.get("drop") or []]
    uid = context.get("runAsUser", (pod.get("securityContext") or {}).get("runAsUser"))
    return uid in (None, 0) and not dropped
