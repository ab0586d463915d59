"""Find containers that must run as process 1, signal process 1 or read its files in /proc.

They fail in a supervised pod, whose containers share a process namespace. The check sees the pod
spec, but not the entrypoint inside an image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import OptionNames

Object = dict[str, Any]

_COMMAND_SEPARATOR_PATTERN = re.compile(r"[;&|\n(){}`]")
_QUOTE_REMOVAL_TABLE = str.maketrans("", "", "\"'")
_OWN_PID_PATTERN = r"(?:getpid\s*\(\s*\)|\b[pP]rocess\.pid|\${2,4}|\$\{?BASHPID\}?)[\"'\]]*"
"""Pattern for the caller's own process ID in Python, JavaScript, Ruby and shells."""
_COMPARISON_PATTERN = r"\s*(?:!==?|===?|=|<>|>|-(?:eq|ne|gt)|\bis(?:\s+not)?\b)\s*"
_REFERENCE_PATTERNS = (
    r"/proc/1(?![0-9])",
    # os.kill(1, 15), process.kill(1), Process.kill("TERM", 1), kill TERM => 1
    r"\b[kK]ill(?:pg)?\s*\(\s*-?1\s*[,)]",
    r"\bkill\s*\(?\s*[\"':]?[A-Z][\w\"']*\s*(?:,|=>)\s*-?1\b",
    r"\b(?:Process|pidfd_open)\s*\(\s*(?:pid\s*=\s*)?1\s*[,)]",
    r"(?i:\b[a-z_]*pid)=[\"']?1[\"']?(?=[\s;&|)]|$)",
    r"\b(?:gdb|lsof|nsenter|pgrep|pkill|prlimit|ps|py-spy|strace|tail|top)\b[^;&|\n]*"
    r"(?:\s-[a-zA-Z]*[pPt]\s*|--(?:parent|pid|ppid|target)[=\s]\s*)1(?![\w.])",
    r"\b(?:gcore|jcmd|jmap|jstack|pmap)\s+(?:-\S+\s+)*1(?![\w.])",
    r"\bkillall5\b",
)
_CHECK_PATTERNS = (
    _OWN_PID_PATTERN + _COMPARISON_PATTERN + r"[\"']?1\b",
    r"\b1[\"']?" + _COMPARISON_PATTERN + r"[\"']?(?:os\.)?" + _OWN_PID_PATTERN,
)
FIRST_PROCESS_REFERENCE_PATTERN = re.compile("|".join(_REFERENCE_PATTERNS))
FIRST_PROCESS_CHECK_PATTERN = re.compile("|".join(_CHECK_PATTERNS))
INIT_PROGRAMS = frozenset(
    {
        *("/init", "/sbin/init", "/usr/sbin/init", "/bin/init", "/sbin/openrc-init"),
        *("catatonit", "runit-init", "s6-linux-init", "s6-overlay-suexec", "systemd"),
    }
)
"""Programs that work only as process 1, by path or by a unique name."""
INIT_SYSTEM_IMAGE_PATTERN = re.compile(
    r"(^|/)linuxserver/|(^|/)ubi\d+(-minimal)?[-/](ubi-)?init(:|@|$)|systemd"
)
"""Pattern for images that start an init system by default: s6-overlay or systemd."""
S6_VARIABLE_PREFIX = "S6_"

PROBE_FIELDS = ("startupProbe", "readinessProbe", "livenessProbe")
HOOK_FIELDS = ("postStart", "preStop")


def check_first_process(pod: Object, path: str, fields: OptionNames) -> None:
    """Reject a pod with a long-running container that depends on process 1.

    Accept a pod whose containers already share a process namespace. Raises InjectionError.
    """
    if pod.get("shareProcessNamespace") is True:
        return
    if (found := find_first_process_dependency(pod)) is not None:
        raise InjectionError(
            f"{path}.{found}, but the engine is not process 1 with a supervisor, because the"
            " containers share a process namespace: signal the engine by name, start it without an"
            f" init system, or exclude the workload with {fields.exclude}"
        )


def find_first_process_dependency(pod: Object) -> str | None:
    """Return a clause about a field of the pod spec that depends on process 1, or None.

    An example is ``containers[engine].command must be process 1``.
    """
    listed = [("containers", one) for one in _as_list(pod.get("containers"))]
    listed += [
        ("initContainers", one)
        for one in _as_list(pod.get("initContainers"))
        if _as_object(one).get("restartPolicy") == "Always"
    ]
    for kind, container in listed:
        for field, why in _iterate_dependencies(_as_object(container)):
            return f"{kind}[{_as_object(container).get('name')}].{field} {why} process 1"
    return None


def _iterate_dependencies(container: Object) -> Iterator[tuple[str, str]]:
    """Yield each field that depends on process 1, and ``names`` or ``must be`` as its verb."""
    for field, command in _iterate_commands(container):
        text = " ".join(command)
        if FIRST_PROCESS_REFERENCE_PATTERN.search(text) or any(
            map(_signals_first_process, _COMMAND_SEPARATOR_PATTERN.split(text))
        ):
            yield field, "names"
        elif FIRST_PROCESS_CHECK_PATTERN.search(text) or any(
            _starts_init(word) for word in command
        ):
            yield field, "must be"
    if container.get("command"):
        return
    if INIT_SYSTEM_IMAGE_PATTERN.search(str(container.get("image"))):
        yield "image", "must be"
    for variable in _as_list(container.get("env")):
        if str(_as_object(variable).get("name")).startswith(S6_VARIABLE_PREFIX):
            yield f"env[{variable['name']}] belongs to s6-overlay, which", "must be"


def _iterate_commands(container: Object) -> Iterator[tuple[str, list[str]]]:
    for key in ("command", "args"):
        yield key, [str(one) for one in _as_list(container.get(key))]
    for owner, prefix, keys in (
        (_as_object(container.get("lifecycle")), "lifecycle.", HOOK_FIELDS),
        (container, "", PROBE_FIELDS),
    ):
        for key in keys:
            command = _as_object(_as_object(owner.get(key)).get("exec")).get("command")
            yield f"{prefix}{key}.exec.command", [str(one) for one in _as_list(command)]


# The process ID ``-1`` means all processes.
def _signals_first_process(command: str) -> bool:
    words = command.translate(_QUOTE_REMOVAL_TABLE).split()
    at = next((n for n, one in enumerate(words) if one.rpartition("/")[2] == "kill"), None)
    # The first argument may be a signal, where -1 means SIGHUP.
    return at is not None and ("1" in words[at + 1 :] or "-1" in words[at + 2 :])


def _starts_init(word: str) -> bool:
    for part in _COMMAND_SEPARATOR_PATTERN.split(word):
        program = part.translate(_QUOTE_REMOVAL_TABLE).strip().removeprefix("exec ").split()
        if program and (
            program[0] in INIT_PROGRAMS or program[0].rpartition("/")[2] in INIT_PROGRAMS
        ):
            return True
    return False


def _as_object(value: object) -> Object:
    return value if isinstance(value, dict) else {}


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
