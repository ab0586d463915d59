"""Commands about a cluster (or ``--local``): each imports what it needs when it runs."""

from __future__ import annotations

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
    """Watch the leak budgets of all services and policies, worst first."""
    from plimsoll_cli.cluster import top as showing

    showing.run(options.cluster(kubeconfig, context, namespace, everywhere), output, once)


def incidents(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Show only incidents of this service, workload or policy: its name, or KIND/NAME."
        ),
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

    wanted = listing.Filter(target, phase, kind, open_only)
    wanted.check()
    if local or run_dir is not None:

        def read() -> list[IncidentView]:
            return listing.local(target, run_dir)

        # A run directory is one service's, whatever it is called.
        wanted = listing.Filter(None, phase, kind, open_only)
    else:
        cluster = options.cluster(kubeconfig, context, namespace, everywhere)

        def read() -> list[IncidentView]:
            with waiting("reading incidents") as tell:
                return listing.of_cluster(cluster, target, tell)

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
        shown = listing.named(options.cluster(kubeconfig, context, namespace), incident)
    if output.for_people:
        out = console()
        explaining.show(shown, out, plain(out))
    else:
        write(listing.objects(shown) | {"next": explaining.next_step(shown)}, output)


def doctor(
    service: Annotated[
        str | None, typer.Option(help="Check only replicas of this service.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Check only this SupervisionPolicy and its pods.")
    ] = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    everywhere: options.Everywhere = False,
    output: options.Form = Output.TABLE,
) -> None:
    """Check the cluster, CRDs, permissions, operator, policies, webhook and each supervisor."""
    from dataclasses import asdict

    from plimsoll_cli.cluster import doctor as checking
    from plimsoll_cli.output import console, write

    checks = []
    out = console()
    cluster = options.cluster(kubeconfig, context, namespace, everywhere, checked=False)
    for check in checking.run(cluster, service, policy):
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


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    for command in (top, incidents, explain, doctor):
        app.command()(command)
