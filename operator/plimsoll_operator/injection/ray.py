"""Finds the container of a Ray worker in which Ray starts the engine's processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from plimsoll_operator.injection import command_line
from plimsoll_operator.injection.command_line import program
from plimsoll_operator.injection.engine import names
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import Options

Object = dict[str, Any]


def worker_container(pod: Object, at: str, options: Options) -> str:
    """Return the name of the container of a Ray worker that runs the engine.

    This is the one that ``options`` name if the worker has it, its only one, or the only one that
    runs ``ray start``. A RayCluster may name the containers of its head and its workers
    differently, so a name that the worker lacks is no error. Raises InjectionError, which begins
    with ``at``, if no container matches.
    """
    named = options.engine.container
    containers: list[Object] = pod.get("containers") or []
    if any(one.get("name") == named for one in containers):
        return str(named)
    starting = containers if len(containers) == 1 else [one for one in containers if _starts(one)]
    if len(starting) != 1:
        raise InjectionError(
            f"{at}.containers: {len(starting) or 'none'} of the containers of this Ray worker run"
            f" `ray start`: use {options.fields.container} with one of {names(pod, options)}"
        )
    return str(starting[0]["name"])


def _starts(container: Object) -> bool:
    """Report whether the container runs ``ray start``, as KubeRay writes it into a shell script."""
    commands = command_line.of_container(container).commands
    return any(
        program(word) == "ray" and verb == "start"
        for words in commands
        for word, verb in pairwise(words)
    )
