"""Commands about a cluster (or ``--local``): each imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Callable
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
    once: Annotated[bool, typer.Option("--once", help="Print once, do not stay.")] = False,
) -> None:
    """Watch every service's leak budget, worst first."""
    from plimsoll_cli.cluster import top as showing

    showing.run(options.cluster(kubeconfig, context, namespace, everywhere), output, once)


def incidents(
    service: Annotated[str | None, typer.Argument(help="Of this service only.")] = None,
    local: options.Local = False,
    run_dir: options.RunDir = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    everywhere: options.Everywhere = False,
    phase: Annotated[str | None, typer.Option(help="For example Unresolved.")] = None,
    kind: Annotated[str | None, typer.Option(help="For example HostGrowth.")] = None,
    open_only: Annotated[bool, typer.Option("--open", help="Not ended yet.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="The newest only.")] = 100,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Then follow changes.")] = False,
    output: options.Form = Output.TABLE,
) -> None:
    """List incidents, newest first."""
    from plimsoll_cli import incidents as listing
    from plimsoll_cli.output import waiting
    from plimsoll_cli.told import Told

    wanted = listing.Filter(service, phase, kind, open_only)
    wanted.check()
    if local or run_dir is not None:

        def read() -> list[Told]:
            return listing.local(service, run_dir)

        # A run directory is one service's, whatever it is called.
        wanted = listing.Filter(None, phase, kind, open_only)
    else:
        from plimsoll_cli.cluster import stories

        cluster = options.cluster(kubeconfig, context, namespace, everywhere)

        def read() -> list[Told]:
            with waiting("reading incidents") as tell:
                return stories.every(cluster, service, tell)

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
    """Tell an incident's story: what grew, what was tried, what came back, what to do next."""
    from plimsoll_cli import explain as telling
    from plimsoll_cli import incidents as listing
    from plimsoll_cli.output import console, plain, write

    if local or run_dir is not None:
        found = [one for one in listing.local(None, run_dir) if one.name == incident]
        if not found:
            raise UsageError(
                f"{incident}: not in the journals here; see: plimsoll incidents --local"
            )
        told = found[0]
    else:
        from plimsoll_cli.cluster import stories

        told = stories.one(options.cluster(kubeconfig, context, namespace), incident)
    if output.for_people:
        out = console()
        telling.show(told, out, plain(out))
    else:
        write(listing.objects(told) | {"next": telling.next_step(told)}, output)


def doctor(
    service: Annotated[str | None, typer.Option(help="Its replicas only.")] = None,
    kubeconfig: options.Kubeconfig = None,
    context: options.Context = None,
    namespace: options.Namespace = None,
    everywhere: options.Everywhere = False,
    output: options.Form = Output.TABLE,
) -> None:
    """Check cluster, CRDs, permissions, operator and what each supervisor sees."""
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
        pod: Annotated[str, typer.Argument(help="The replica; with --local its service.")],
        local: options.Local = False,
        run_dir: options.RunDir = None,
        kubeconfig: options.Kubeconfig = None,
        context: options.Context = None,
        namespace: options.Namespace = None,
        yes: options.Yes = False,
        deadline: Annotated[
            float, typer.Option(parser=options.duration, metavar="TIME", help="Of a drain.")
        ] = "30s",  # type: ignore[assignment]
    ) -> None:
        from plimsoll_cli import actions

        if local or run_dir is not None:
            from plimsoll_cli.local import ask, root

            reach = ask.beside(run_dir or root.of(pod))
        else:
            from plimsoll_cli.cluster.exec import beside

            reach = beside(options.cluster(kubeconfig, context, namespace), pod)
        answer = actions.act(reach, what, pod, yes, deadline, typer.confirm)
        typer.echo(f"{what} {pod}: {answer.message or 'done'}")

    command.__doc__ = text
    return command


def register(app: typer.Typer) -> None:
    """Adds these commands to the program."""
    for command in (top, incidents, explain, doctor):
        app.command()(command)
    for what, text in (
        ("trim", "Have a replica give cached memory back."),
        ("drain", "Take a replica out of service and let its requests finish."),
        ("restart", "Replace a replica's worker; running requests go on."),
        ("resume", "Put a replica back into service and reset its restart budget."),
    ):
        app.command(what)(_action(what, text))
