"""Find the container of a Ray worker in which Ray starts the engine's processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from plimsoll_operator.injection import command_line
from plimsoll_operator.injection.command_line import get_program_name
from plimsoll_operator.injection.engine import describe_containers
from plimsoll_operator.injection.errors import InjectionError
from plimsoll_operator.injection.options import InjectionOptions

Object = dict[str, Any]


def find_worker_container(pod: Object, path: str, options: InjectionOptions) -> str:
    """Return the name of the container in a Ray worker that runs the engine.

    This is the container that ``options`` name, the only container, or the only one that runs ``ray
    start``. Raises InjectionError if it is unclear.
    """
    named = options.engine.container
    containers: list[Object] = pod.get("containers") or []
    if any(one.get("name") == named for one in containers):
        return str(named)
    starting = (
        containers if len(containers) == 1 else [one for one in containers if _starts_ray(one)]
    )
    if len(starting) != 1:
        raise InjectionError(
            f"{path}.containers: {len(starting) or 'none'} of the containers in this Ray worker"
            f" run `ray start`: select the engine's container with {options.fields.container}:"
            f" {describe_containers(pod, options)}"
        )
    return str(starting[0]["name"])


def _starts_ray(container: Object) -> bool:
    commands = command_line.parse_container(container).commands
    return any(
        get_program_name(word) == "ray" and verb == "start"
        for words in commands
        for word, verb in pairwise(words)
    )
