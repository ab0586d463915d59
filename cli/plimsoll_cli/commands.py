"""Commands that use a cluster or, with ``--local``, this machine."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from plimsoll_api.action_answer import ActionAnswer
from plimsoll_api.names import DEFAULT_DRAIN_S
from plimsoll_cli import options
from plimsoll_cli.errors import RunError, UsageError
from plimsoll_cli.output import Output


def top(
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    all_namespaces: options.AllNamespaces = False,
    output: options.OutputOption = Output.TABLE,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Watch the leak budgets of all services and policies, worst first."""
    from plimsoll_cli.cluster import top as showing

    showing.show_rows(options.connect(kubeconfig, context, namespace, all_namespaces), output, once)


def incidents(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show only incidents of this service, workload or policy: NAME or KIND/NAME.",
        ),
    ] = None,
    local: options.Local = False,
    run_dir: options.RunDir = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    all_namespaces: options.AllNamespaces = False,
    phase: Annotated[
        str | None, typer.Option(help="Show only this phase, for example Unresolved.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Show only this kind, for example HostGrowth.")
    ] = None,
    open_only: Annotated[bool, typer.Option("--open", help="Show only open incidents.")] = False,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of incidents to show, newest first.")
    ] = 100,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep running, and print each change.")
    ] = False,
    output: options.OutputOption = Output.TABLE,
) -> None:
    """List incidents, newest first."""
    from plimsoll_cli import incidents as listing
    from plimsoll_cli.output import show_spinner

    wanted = listing.IncidentFilter(target, phase, kind, open_only)
    wanted.validate()
    searched = None
    if local or run_dir is not None:

        def read() -> listing.Listing:
            return listing.read_local_incidents(target, run_dir)

        # A run directory belongs to one service.
        wanted = listing.IncidentFilter(None, phase, kind, open_only)
    else:
        cluster = options.connect(kubeconfig, context, namespace, all_namespaces, has_local=True)
        searched = cluster.namespace

        def read() -> listing.Listing:
            with show_spinner("reading incidents") as update:
                return listing.list_incidents(cluster, target, update)

    if watch:
        listing.watch_incidents(read, wanted, output)
        return
    found, problem = read()
    shown = listing.select_newest_incidents(found, wanted, limit)
    omitted = len(listing.select_newest_incidents(found, wanted, None)) - len(shown)
    if shown or problem is None or not output.is_table:  # unknown is not "no incidents"
        listing.print_incidents(shown, output, omitted, searched)
    if problem is not None:
        raise RunError(problem)


def explain(
    incident: Annotated[str, typer.Argument(metavar="INCIDENT", help="Name of the incident.")],
    local: options.Local = False,
    run_dir: options.RunDir = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    output: options.OutputOption = Output.TABLE,
) -> None:
    """Explain an incident: what grew, what was tried, how much memory was freed, what to do."""
    from plimsoll_cli import explain as explaining
    from plimsoll_cli import incidents as listing
    from plimsoll_cli.output import is_ascii_only, make_console, print_value

    if local or run_dir is not None:
        known, problem = listing.read_local_incidents(None, run_dir)
        found = [one for one in known if one.name == incident]
        if not found:
            raise UsageError(
                f"incident {incident} does not exist on this machine: to list incidents, run:"
                f" plimsoll incidents --local{f'; {problem}' if problem else ''}"
            )
        shown = found[0]
    else:
        cluster = options.connect(kubeconfig, context, namespace, has_local=True)
        shown = listing.get_incident(cluster, incident)
    if output.is_table:
        out = make_console()
        explaining.print_story(shown, out, is_ascii_only(out))
    else:
        print_value(
            listing.make_incident_object(shown) | {"next": explaining.choose_next_step(shown)},
            output,
        )


def doctor(
    service: Annotated[
        str | None, typer.Option(help="Check only the replicas of this service.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Check only this SupervisionPolicy and its pods.")
    ] = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    all_namespaces: options.AllNamespaces = False,
    output: options.OutputOption = Output.TABLE,
) -> None:
    """Check the cluster, CRDs, permissions, operator, policies, webhook and each supervisor."""
    from dataclasses import asdict

    from plimsoll_cli.cluster import doctor as checking
    from plimsoll_cli.output import make_console, print_value

    checks = []
    out = make_console()
    cluster = options.connect(kubeconfig, context, namespace, all_namespaces, check_namespace=False)
    for check in checking.run_checks(cluster, service, policy):
        checks.append(check)
        if output.is_table:
            mark = {True: "ok", False: "BAD", None: "?"}[check.ok]
            style = {True: "green", False: "bold red", None: "yellow"}[check.ok]
            out.print(f"[{style}]{mark:<4}[/] ", end="")
            out.print(f"{check.name}: {check.text}", markup=False, soft_wrap=True)
    if not output.is_table:
        print_value([asdict(check) for check in checks], output)
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)


def verdict(
    revision: Annotated[
        str, typer.Argument(metavar="REVISION", help="Revision to check, from status.verdicts.")
    ],
    wait: Annotated[
        float,
        typer.Option(
            parser=options.parse_duration_option,
            metavar="TIME",
            help="Maximum time to wait for the verdict Yes or No.",
        ),
    ] = "0s",  # type: ignore[assignment]
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    all_namespaces: options.AllNamespaces = False,
    output: options.OutputOption = Output.TABLE,
) -> None:
    """Show whether a revision leaks. The exit status is 0 for No, 1 for Yes and 3 for Unknown."""
    from plimsoll_cli.cluster import verdict as judging

    cluster = options.connect(kubeconfig, context, namespace, all_namespaces)
    raise typer.Exit(judging.show_verdicts(cluster, revision, wait, output))


TargetName = Annotated[
    str,
    typer.Argument(
        metavar="POD",
        help="A pod, or KIND/NAME for all its supervised pods, for example deployment/vllm. With "
        "--local: the name of the service.",
    ),
]
Deadline = Annotated[
    float,
    typer.Option(
        parser=options.parse_duration_option, metavar="TIME", help="Maximum duration of the drain."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Drain the pod even if it is the last ready pod of a Service."),
]
Service = Annotated[
    bool,
    typer.Option(
        "--service",
        help="Also reset the restart count of the whole service or workload.",
    ),
]


def _make_parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


COMMON_PARAMETERS = (
    _make_parameter("target", TargetName, inspect.Parameter.empty),
    _make_parameter("local", options.Local, False),
    _make_parameter("run_dir", options.RunDir, None),
    _make_parameter("kubeconfig", options.Kubeconfig, None),
    _make_parameter("context", options.Context, None),
    _make_parameter("namespace", options.Namespace, None),
    _make_parameter("yes", options.Yes, False),
)
DEADLINE_PARAMETER = _make_parameter("deadline", Deadline, f"{DEFAULT_DRAIN_S:.0f}s")
SERVICE_PARAMETER = _make_parameter("service", Service, False)
FORCE_PARAMETER = _make_parameter("force", Force, False)
ACTIONS = {
    "trim": ("Free a replica's cached memory.", ()),
    "drain": (
        "Take a replica out of service and let running requests finish.",
        (DEADLINE_PARAMETER, FORCE_PARAMETER),
    ),
    "restart": (
        "Restart a replica's engine. Running requests continue if the engine can carry them over.",
        (DEADLINE_PARAMETER,),
    ),
    "resume": (
        "Put a replica back into service and reset its restart budget.",
        (SERVICE_PARAMETER,),
    ),
}
"""Help text of each action, and its additional options."""


def _make_command(action: str, action_options: tuple[inspect.Parameter, ...]) -> Any:
    def command(**arguments: Any) -> None:
        _run_action(action, **arguments)

    parameters = (*COMMON_PARAMETERS, *action_options)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _run_action(
    action: str,
    target: str,
    local: bool,
    run_dir: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    yes: bool,
    deadline: float = DEFAULT_DRAIN_S,
    service: bool = False,
    force: bool = False,
) -> None:
    from plimsoll_cli.actions import run_action

    def print_answer(pod: str, answer: ActionAnswer) -> None:
        typer.echo(f"{action} {pod}: {answer.message or 'done'}")

    if local or run_dir is not None:
        from plimsoll_cli.local import run_dir as folders

        reach = folders.make_supervisor_caller(run_dir or folders.get_service_dir(target))
        print_answer(
            target, run_action(reach, action, target, yes, deadline, typer.confirm, service)
        )
        return
    from plimsoll_cli.cluster.actions import (
        make_supervisor_caller,
        refuse_last_ready_pod,
        run_action_on_pods,
    )
    from plimsoll_cli.targets import parse_target

    found = parse_target(target)
    cluster = options.connect(kubeconfig, context, namespace, has_local=True)
    if not found.is_pod:
        run_action_on_pods(
            cluster, action, found, yes, deadline, typer.confirm, service, print_answer
        )
        return
    pod = found.name
    if action == "drain" and not force:
        refuse_last_ready_pod(cluster, pod)
    print_answer(
        pod,
        run_action(
            make_supervisor_caller(cluster, pod), action, pod, yes, deadline, typer.confirm, service
        ),
    )


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    for command in (top, incidents, explain, doctor, verdict):
        app.command()(command)
    for action, (text, action_options) in ACTIONS.items():
        app.command(action, help=text)(_make_command(action, action_options))
