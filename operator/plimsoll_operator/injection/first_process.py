"""What shows that a container must be process 1 of its own, or signals or reads that process.

In a supervised pod the containers share their process IDs, and process 1 is the pod's sandbox: a
``kill 1`` before the pod stops ends all containers at once, and an init system does not start.
Only what a pod says is seen here. An entrypoint inside an image is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import Fields

Object = dict[str, Any]

_PARTS = re.compile(r"[;&|\n(){}`]")
"""Ends of a command within a shell's script."""
_QUOTES = str.maketrans("", "", "\"'")
_OWN = r"(?:getpid\s*\(\s*\)|\b[pP]rocess\.pid|\${2,4}|\$\{?BASHPID\}?)[\"'\]]*"
"""The process ID of whoever asks, in Python, JavaScript, Ruby and a shell."""
_IS = r"\s*(?:!==?|===?|=|<>|>|-(?:eq|ne|gt)|\bis(?:\s+not)?\b)\s*"
_NAMES = (
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
_CHECKS = (_OWN + _IS + r"[\"']?1\b", r"\b1[\"']?" + _IS + r"[\"']?(?:os\.)?" + _OWN)
NAMES = re.compile("|".join(_NAMES))
CHECKS = re.compile("|".join(_CHECKS))
INITS = frozenset(
    {
        *("/init", "/sbin/init", "/usr/sbin/init", "/bin/init", "/sbin/openrc-init"),
        *("catatonit", "runit-init", "s6-linux-init", "s6-overlay-suexec", "systemd"),
    }
)
"""Programs that end, or do not do their work, where they are not process 1: by path, or by name
where the name is not used for anything else."""
INIT_IMAGES = re.compile(r"(^|/)linuxserver/|(^|/)ubi\d+(-minimal)?[-/](ubi-)?init(:|@|$)|systemd")
"""Images that start such a program by themselves: s6-overlay and systemd."""
S6 = "S6_"
"""How the variables of s6-overlay begin."""

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
HOOKS = ("postStart", "preStop")


def check_first_process(pod: Object, at: str, fields: Fields) -> None:
    """Refuse a pod in which process 1 matters to a container that stays.

    Raises InjectionError, which names the field. Where the containers share their process IDs
    already, the supervisor changes nothing.
    """
    if pod.get("shareProcessNamespace") is True:
        return
    if (found := first_process(pod)) is not None:
        raise InjectionError(
            f"{at}.{found}, which is another one where containers share their process IDs, as with"
            " a supervisor: signal the engine by its name, start it without an init system, or"
            f" exclude the workload with {fields.exclude}"
        )


def first_process(pod: Object) -> str | None:
    """Say which field of a pod spec names process 1, or must be it; None if nothing shows that."""
    listed = [("containers", one) for one in _list(pod.get("containers"))]
    listed += [
        ("initContainers", one)
        for one in _list(pod.get("initContainers"))
        if _object(one).get("restartPolicy") == "Always"
    ]
    for kind, container in listed:
        for field, why in _reasons(_object(container)):
            return f"{kind}[{_object(container).get('name')}].{field} {why} process 1"
    return None


def _reasons(container: Object) -> Iterator[tuple[str, str]]:
    """Yield each field that depends on process 1, and in which way."""
    for field, command in _commands(container):
        text = " ".join(command)
        if NAMES.search(text) or any(map(_kills, _PARTS.split(text))):
            yield field, "names"
        elif CHECKS.search(text) or any(_starts_init(word) for word in command):
            yield field, "must be"
    if container.get("command"):
        return
    if INIT_IMAGES.search(str(container.get("image"))):
        yield "image", "must be"
    for one in _list(container.get("env")):
        if str(_object(one).get("name")).startswith(S6):
            yield f"env[{one['name']}] is of s6-overlay, which", "must be"


def _commands(container: Object) -> Iterator[tuple[str, list[str]]]:
    """Yield each field of a container with a command, and the command."""
    for key in ("command", "args"):
        yield key, [str(one) for one in _list(container.get(key))]
    for owner, prefix, keys in (
        (_object(container.get("lifecycle")), "lifecycle.", HOOKS),
        (container, "", PROBES),
    ):
        for key in keys:
            command = _object(_object(owner.get(key)).get("exec")).get("command")
            yield f"{prefix}{key}.exec.command", [str(one) for one in _list(command)]


def _kills(part: str) -> bool:
    """Whether a command of a shell signals process 1, or every process that it may (``-1``)."""
    words = part.translate(_QUOTES).split()
    at = next((n for n, one in enumerate(words) if one.rpartition("/")[2] == "kill"), None)
    # The first word after it may be a signal: -1 is a hangup there.
    return at is not None and ("1" in words[at + 1 :] or "-1" in words[at + 2 :])


def _starts_init(word: str) -> bool:
    """Whether a word of a command, which may be a script, starts an init system."""
    for part in _PARTS.split(word):
        program = part.translate(_QUOTES).strip().removeprefix("exec ").split()
        if program and (program[0] in INITS or program[0].rpartition("/")[2] in INITS):
            return True
    return False


def _object(value: object) -> Object:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
