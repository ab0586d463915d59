"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plimsoll_cli.errors import UsageError
from plimsoll_cli.output import Output

if TYPE_CHECKING:
    from plimsoll_cli.cluster.client import Cluster


def parse_duration_option(text: str) -> float:
    """Return the seconds of a duration such as ``10m``."""
    from plimsoll_api.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="Run directory. Default: ~/.local/state/plimsoll/SERVICE."
    ),
]
Local = Annotated[
    bool,
    typer.Option("--local", help="Use services on this machine instead of those in a cluster."),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", metavar="FILE", help="Kubeconfig file (default: the same as kubectl)."
    ),
]
Context = Annotated[
    str | None, typer.Option("--context", help="Name of the context in the kubeconfig.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace (default: that of the context).")
]
HostBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Growth budget for host memory, or Auto.")
]
DeviceBudget = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Growth budget for device memory, or Auto.")
]
Window = Annotated[
    str | None, typer.Option(metavar="TIME", help="Period that the budgets apply to.")
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Use all namespaces.")]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def connect(
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    all_namespaces: bool = False,
    check_namespace: bool = True,
    has_local: bool = False,
) -> Cluster:
    """Return a client of the cluster that the options select.

    Raises UsageError if the options are invalid or no cluster is configured. With
    ``check_namespace``, also raises UsageError if the namespace does not exist, and RunError if the
    API server does not answer. ``has_local`` is whether the command has the option ``--local``.
    """
    if namespace is not None and all_namespaces:
        raise UsageError("use either --namespace or --all-namespaces, not both")
    if kubeconfig is not None and not kubeconfig.is_file():
        raise UsageError(f"--kubeconfig {kubeconfig}: the file does not exist")
    from plimsoll_cli.cluster.client import Cluster, NoClusterError

    try:
        found = Cluster(kubeconfig, context, namespace, all_namespaces)
    except NoClusterError as error:
        hint = ", or add --local for services on this machine" if has_local else ""
        raise UsageError(f"{error}{hint}") from None
    if check_namespace:
        found.check_namespace()
    return found
