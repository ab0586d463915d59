"""Which container of a pod is the engine, which engine it is, and where it serves."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll_api.supervision import EngineType
from plimsoll_cli.errors import UsageError

Object = dict[str, Any]

PORTS = {EngineType.VLLM: 8000, EngineType.SGLANG: 30_000, EngineType.CUSTOM: 8000}
"""Ports of the OpenAI servers where no flag names one (vllm serve, sglang.launch_server)."""
MARKS = ((EngineType.VLLM, re.compile(r"\bvllm\b")), (EngineType.SGLANG, re.compile("sglang")))
KSERVE = "kserve-container"
KSERVE_PORT = 8080
MODEL_FLAGS = ("--served-model-name", "--served_model_name", "--model", "--model-path")


@dataclass(frozen=True)
class Engine:
    """``container`` is its name; ``limit`` its memory limit, None where it has none; ``limits`` are
    all of its limits."""

    container: str
    type: EngineType
    port: int
    model: str
    limits: dict[str, Any]
    uid: int | None

    @property
    def limit(self) -> str | None:
        return self.limits.get("memory")


def find(pod: Object, where: str, named: str | None = None) -> Engine:
    """The engine in a pod spec. UsageError, which says ``where``, when it is not clear."""
    containers: list[Object] = pod.get("containers") or []
    chosen = _choose(containers, where, named)
    words = _words(chosen)
    kind = _type(chosen, words)
    limits = (chosen.get("resources") or {}).get("limits") or {}
    return Engine(
        container=str(chosen["name"]),
        type=kind,
        port=_port(chosen, words, kind),
        model=_model(words),
        limits=limits,
        uid=_uid(pod, chosen),
    )


def _choose(containers: list[Object], where: str, named: str | None) -> Object:
    names = [str(one.get("name")) for one in containers]
    if named is not None:
        if named not in names:
            raise UsageError(f"{where}: no container {named!r}: it has {', '.join(names)}")
        return containers[names.index(named)]
    known = [one for one in containers if _type(one, _words(one)) is not EngineType.CUSTOM]
    for candidates in ([one for one in containers if one.get("name") == KSERVE], known, containers):
        if len(candidates) == 1:
            return candidates[0]
    raise UsageError(
        f"{where}: which container is the engine? Name it with --container: {', '.join(names)}"
    )


def _words(container: Object) -> list[str]:
    """Command and arguments as words, also those within a ``sh -c`` script."""
    words: list[str] = []
    for part in [*(container.get("command") or []), *(container.get("args") or [])]:
        try:
            words += shlex.split(str(part).replace("\\\n", " "), comments=True)
        except ValueError:
            words += str(part).split()
    return words


def _type(container: Object, words: Sequence[str]) -> EngineType:
    # Not of every word: a model or a path may be called anything.
    text = " ".join([str(container.get("image", "")), *words[:12]])
    for kind, mark in MARKS:
        if mark.search(text):
            return kind
    if container.get("name") == KSERVE and "huggingface" in text:
        return EngineType.VLLM
    return EngineType.CUSTOM


def _port(container: Object, words: Sequence[str], kind: EngineType) -> int:
    for flag in ("--port", "--http_port", "--http-port"):
        found = _flag(words, flag)
        if found is not None and found.isdigit():
            return int(found)
    ports = container.get("ports") or []
    if ports:
        return int(ports[0]["containerPort"])
    return KSERVE_PORT if container.get("name") == KSERVE else PORTS[kind]


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


def _uid(pod: Object, container: Object) -> int | None:
    for context in (container.get("securityContext"), pod.get("securityContext")):
        found = (context or {}).get("runAsUser")
        if found is not None:
            return int(found)
    return None
