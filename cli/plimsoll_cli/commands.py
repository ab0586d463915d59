"""Commands about a cluster (or ``--local``): each imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from plimsoll_cli import options
from plimsoll_cli.errors import UsageError
from plimsoll_cli.output import Output


def top(
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    everywhere: options.Everywhere = False,
    output: options.Form = Output.TABLE,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Watch every service's leak budget, worst first."""
    from plimsoll_cli.cluster import top as showing

    showing.run(options.cluster(kubeconfig, context, namespace, everywhere), output, once)


def incidents(
    service: Annotated[
        str | None, typer.Argument(help="Show only incidents of this service.")
    ] = None,
    local: options.Local = False,
    run_dir: options.RunDir = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    everywhere: options.Everywhere = False,
    phase: Annotated[
        str | None, typer.Option(help="Show only this phase, for example Unresolved.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Show only this kind, for example HostGrowth.")
    ] = None,
    open_only: Annotated[bool, typer.Option("--open", help="Show only open incidents.")] = False,
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of incidents, newest first.")
    ] = 100,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print each change until Ctrl-C.")
    ] = False,
    output: options.Form = Output.TABLE,
) -> None:
    """List incidents, newest first."""
    from plimsoll_cli import incidents as listing
    from plimsoll_cli.incident_view import IncidentView
    from plimsoll_cli.output import waiting

    wanted = listing.Filter(service, phase, kind, open_only)
    wanted.check()
    if local or run_dir is not None:

        def read() -> list[IncidentView]:
            return listing.local(service, run_dir)

        # A run directory is one service's, whatever it is called.
        wanted = listing.Filter(None, phase, kind, open_only)
    else:
        from plimsoll_cli.cluster import leak_incidents

        cluster = options.cluster(kubeconfig, context, namespace, everywhere)

        def read() -> list[IncidentView]:
            with waiting("reading incidents") as tell:
                return leak_incidents.every(cluster, service, tell)

    if watch:
        listing.watch(read, wanted, output)
        return
    found = read()
    shown = listing.listing(found, wanted, limit)
    listing.print_list(shown, output, len(listing.listing(found, wanted, None)) - len(shown))


def explain(
    incident: Annotated[str, typer.Argument(help="Name of the incident.")],
    local: options.Local = False,
    run_dir: options.RunDir = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    output: options.Form = Output.TABLE,
) -> None:
    """Explain an incident: what grew, what was tried, what came back, what to do next."""
    from plimsoll_cli import explain as explaining
    from plimsoll_cli import incidents as listing
    from plimsoll_cli.output import console, plain, write

    if local or run_dir is not None:
        found = [one for one in listing.local(None, run_dir) if one.name == incident]
        if not found:
            raise UsageError(
                f"{incident}: no local journal has this incident; see: plimsoll incidents --local"
            )
        shown = found[0]
    else:
        from plimsoll_cli.cluster import leak_incidents

        shown = leak_incidents.one(options.cluster(kubeconfig, context, namespace), incident)
    if output.for_people:
        out = console()
        explaining.show(shown, out, plain(out))
    else:
        write(listing.objects(shown) | {"next": explaining.next_step(shown)}, output)


def doctor(
    service: Annotated[
        str | None, typer.Option(help="Check only replicas of this service.")
    ] = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    everywhere: options.Everywhere = False,
    output: options.Form = Output.TABLE,
) -> None:
    """Check the cluster, CRDs, permissions, operator and each supervisor."""
    from dataclasses import asdict

    from plimsoll_cli.cluster import doctor as checking
    from plimsoll_cli.output import console, write

    checks = []
    out = console()
    for check in checking.run(options.cluster(kubeconfig, context, namespace, everywhere), service):
        checks.append(check)
        if output.for_people:
            mark = {True: "ok", False: "BAD", None: "?"}[check.ok]
            style = {True: "green", False: "bold red", None: "yellow"}[check.ok]
            out.print(f"[{style}]{mark:<4}[/] ", end="")
            out.print(f"{check.name}: {check.text}", markup=False, soft_wrap=True)
    if not output.for_people:
        write([asdict(check) for check in checks], output)
    if any(check.ok is False for check in checks):
        raise typer.Exit(1)


def _action(what: str, text: str) -> Callable[..., None]:
    """The command of one action; ``text`` is its help."""

    def command(
        pod: Annotated[
            str, typer.Argument(help="Pod of the replica. With --local: name of the service.")
        ],
        local: options.Local = False,
        run_dir: options.RunDir = None,
        kubeconfig: options.Kubeconfig = None,
        context: options.Context = None,
        namespace: options.Namespace = None,
        yes: options.Yes = False,
        deadline: Annotated[
            float,
            typer.Option(parser=options.duration, metavar="TIME", help="Maximum time to drain."),
        ] = "30s",  # type: ignore[assignment]
    ) -> None:
        _do(what, pod, local, run_dir, kubeconfig, context, namespace, yes, deadline)

    command.__doc__ = text
    return command


def resume(
    pod: Annotated[
        str, typer.Argument(help="Pod of the replica. With --local: name of the service.")
    ],
    local: options.Local = False,
    run_dir: options.RunDir = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    yes: options.Yes = False,
    service: Annotated[
        bool,
        typer.Option(
            "--service", help="Also clear the service's count of restarts for all replicas."
        ),
    ] = False,
) -> None:
    """Put a replica back into service and reset its restart budget."""
    _do("resume", pod, local, run_dir, kubeconfig, context, namespace, yes, 30.0, service)


def _do(
    what: str,
    pod: str,
    local: bool,
    run_dir: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    yes: bool,
    deadline_s: float,
    whole_service: bool = False,
) -> None:
    from plimsoll_cli import actions

    if local or run_dir is not None:
        from plimsoll_cli.local import ask, root

        reach = ask.beside(run_dir or root.of(pod))
    else:
        from plimsoll_cli.cluster.exec import beside

        reach = beside(options.cluster(kubeconfig, context, namespace), pod)
    answer = actions.act(reach, what, pod, yes, deadline_s, typer.confirm, whole_service)
    typer.echo(f"{what} {pod}: {answer.message or 'done'}")


def register(app: typer.Typer) -> None:
    """Adds these commands to the program."""
    for command in (top, incidents, explain, doctor):
        app.command()(command)
    for what, text in (
        ("trim", "Return a replica's cached memory to the system."),
        ("drain", "Take a replica out of service and let running requests finish."),
        ("restart", "Replace a replica's worker. Running requests continue."),
    ):
        app.command(what)(_action(what, text))
    app.command()(resume)
