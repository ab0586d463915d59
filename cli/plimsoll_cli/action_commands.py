"""The commands that act on replicas: trim, drain, restart and resume."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_api.names import DRAIN_S
from plimsoll_cli import options

TargetName = Annotated[
    str,
    typer.Argument(
        help="A pod, or KIND/NAME for all its supervised pods, for example deployment/vllm. With"
        " --local: name of the service.",
    ),
]
Deadline = Annotated[
    float, typer.Option(parser=options.duration, metavar="TIME", help="Maximum time to drain.")
]
Force = Annotated[bool, typer.Option("--force", help="Drain also the last ready pod of a Service.")]
Service = Annotated[
    bool,
    typer.Option(
        "--service",
        help="Also clear the count of restarts of the whole service or workload.",
    ),
]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


COMMON = (
    _parameter("target", TargetName, inspect.Parameter.empty),
    _parameter("local", options.Local, False),
    _parameter("run_dir", options.RunDir, None),
    _parameter("kubeconfig", options.Kubeconfig, None),
    _parameter("context", options.Context, None),
    _parameter("namespace", options.Namespace, None),
    _parameter("yes", options.Yes, False),
)
DEADLINE = _parameter("deadline", Deadline, f"{DRAIN_S:.0f}s")
SERVICE = _parameter("service", Service, False)
FORCE = _parameter("force", Force, False)
ACTIONS = {
    "trim": ("Return a replica's cached memory to the system.", ()),
    "drain": ("Take a replica out of service and let running requests finish.", (DEADLINE, FORCE)),
    "restart": (
        "Restart a replica's engine. Running requests continue if the engine can carry them over.",
        (DEADLINE,),
    ),
    "resume": ("Put a replica back into service and reset its restart budget.", (SERVICE,)),
}
"""Each action's help, and its options beside those of all."""


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    for what, (text, own) in ACTIONS.items():
        app.command(what, help=text)(_command(what, own))


def _command(what: str, own: tuple[inspect.Parameter, ...]) -> Any:
    """Make the function from whose signature typer reads the options of one action."""

    def command(**given: Any) -> None:
        _do(what, **given)

    parameters = (*COMMON, *own)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _do(
    what: str,
    target: str,
    local: bool,
    run_dir: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    yes: bool,
    deadline: float = DRAIN_S,
    service: bool = False,
    force: bool = False,
) -> None:
    from plimsoll_cli.actions import act

    def tell(pod: str, answer: ActionAnswer) -> None:
        typer.echo(f"{what} {pod}: {answer.message or 'done'}")

    if local or run_dir is not None:
        from plimsoll_cli.local import run_dir as folders

        reach = folders.in_supervisor(run_dir or folders.of(target))
        tell(target, act(reach, what, target, yes, deadline, typer.confirm, service))
        return
    from plimsoll_cli.cluster.actions import act_on_all, check_not_last, in_supervisor
    from plimsoll_cli.targets import parse

    found, cluster = parse(target), options.cluster(kubeconfig, context, namespace)
    if not found.is_pod:
        act_on_all(cluster, what, found, yes, deadline, typer.confirm, service, tell)
        return
    pod = found.name
    if what == "drain" and not force:
        check_not_last(cluster, pod)
    tell(pod, act(in_supervisor(cluster, pod), what, pod, yes, deadline, typer.confirm, service))
