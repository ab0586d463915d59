"""Commands ``inject`` and ``validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from plimsoll_cli.errors import UsageError

if TYPE_CHECKING:
    from plimsoll_api.serving import SupervisorSettings
    from plimsoll_operator.injection.options import InjectionOptions

T = TypeVar("T")
POLICY_OPTIONS = (
    "mode", "host_budget", "device_budget", "window", "warmup", "engine", "container", "port",
    "probe",
)  # fmt: skip
"""Options of ``inject`` that cannot be combined with ``--policy``."""


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command()(inject)
    app.command()(validate)


def inject(
    context: typer.Context,
    manifest: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Manifest to read, or - for standard input."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Same as the argument FILE.")
    ] = None,
    supervisor_image: Annotated[
        str | None, typer.Option(help="Container image of the supervisor. Required to inject.")
    ] = None,
    remove: Annotated[
        bool,
        typer.Option(
            "--remove", help="Remove what plimsoll inject has added, and change nothing else."
        ),
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Manifest of a SupervisionPolicy. Its selector selects the pods, and its settings"
                " replace the options for engine, budgets, mode and probe."
            ),
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Change only the object with this name. Repeatable."),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(
            "--selector", "-l", metavar="LABELS", help="Change only objects with these labels."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also supervise engines other than vLLM and SGLang.")
    ] = False,
    mode: Annotated[str, typer.Option(metavar="MODE", help="Observe or Recover.")] = "Observe",
    host_budget: Annotated[
        str, typer.Option(metavar="SIZE", help="Growth budget for host memory, or Auto.")
    ] = "Auto",
    device_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Growth budget for device memory, or Auto. Default: none."
        ),
    ] = None,
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Period that the budgets apply to.")
    ] = "24h",
    warmup: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Time after an engine start during which growth is ignored."
        ),
    ] = "5m",
    engine: Annotated[
        str, typer.Option(metavar="TYPE", help="Type of the engine: auto, vllm, sglang or custom.")
    ] = "auto",
    container: Annotated[
        str | None, typer.Option(help="Name of the engine's container, if the pod has several.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            help="Port of the engine, if the manifest does not specify it.",
        ),
    ] = None,
    run_as_user: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="UID",
            help="User ID of the engine, if the manifest does not set runAsUser.",
        ),
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Platform that assigns user IDs to pods: openshift."),
    ] = None,
    supervisor_requests: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=AMOUNT,…",
            help="Resource requests of the supervisor, for example cpu=20m,memory=96Mi.",
        ),
    ] = None,
    supervisor_limits: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=AMOUNT,…",
            help="Resource limits of the supervisor, for example cpu=200m,memory=256Mi.",
        ),
    ] = None,
    image_pull_secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Secret with credentials for the supervisor's image. Repeatable."
        ),
    ] = None,
    dcgm_exporter_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65_535, metavar="PORT", help="Port of the DCGM exporter on every node."
        ),
    ] = None,
    amd_exporter_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            help="Port of AMD's device-metrics-exporter on every node.",
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Load the probe into the engine's Python processes.")
    ] = False,
    allow_group_restarts: Annotated[
        bool,
        typer.Option(
            "--allow-group-restarts",
            help="Supervise a LeaderWorkerSet whose group restarts with any of its containers.",
        ),
    ] = False,
) -> None:
    """Add a supervisor to the workloads in a manifest."""
    from dataclasses import replace

    from plimsoll_api.manifest import DURATION_FORM, POSITIVE_DURATION_FORM
    from plimsoll_api.memory_policy import MemoryPolicy
    from plimsoll_api.supervision import Supervision
    from plimsoll_api.supervision_policy import SelectedEngine
    from plimsoll_cli.inject import command, flags
    from plimsoll_operator.injection.options import InjectionOptions

    if (manifest is None) == (file is None):
        raise UsageError(
            "inject: specify one manifest, or - for standard input: plimsoll inject -f FILE"
        )
    if remove:
        given = [
            one.name for one in context.command.params if _is_option_set(context, str(one.name))
        ]
        if others := sorted({str(one) for one in given} - {"remove", "manifest", "file"}):
            raise UsageError(
                f"inject: use either --remove or --{others[0].replace('_', '-')}, not both"
            )
        typer.echo(command.remove_from_file(manifest or file or Path("-")).encode(), nl=False)
        return
    if supervisor_image is None:
        raise UsageError(
            "inject: --supervisor-image is missing: add the supervisor's container image"
        )
    flags.parse_option("--supervisor-image", flags.check_image, supervisor_image)
    if policy is not None:
        doubled = [one for one in POLICY_OPTIONS if _is_option_set(context, one)]
        if doubled:
            used = ", ".join("--" + one.replace("_", "-") for one in doubled)
            raise UsageError(
                f"inject: use either --policy or {used}, not both: the policy {policy} contains"
                " these settings"
            )
        options = _read_policy_options(policy, supervisor_image)
    else:
        period = flags.parse_option("--window", POSITIVE_DURATION_FORM.read, window)
        options = InjectionOptions(
            image=supervisor_image,
            engine=SelectedEngine(
                type=flags.parse_option("--engine", flags.parse_type, engine),
                container=container,
                port=flags.parse_option("--port", flags.check_port, port),
            ),
            memory=MemoryPolicy(
                host=flags.parse_budget("--host-budget", host_budget, period),
                device=flags.parse_budget("--device-budget", device_budget, period),
                warmup_s=flags.parse_option("--warmup", DURATION_FORM.read, warmup),
            ),
            supervision=Supervision(mode=flags.parse_option("--mode", flags.parse_mode, mode)),
            probe=probe,
        )
    options = replace(
        options,
        run_as_user=run_as_user,
        supervisor=_merge_settings(
            options.supervisor,
            resources=flags.parse_resources(supervisor_requests, supervisor_limits),
            image_pull_secrets=flags.parse_secrets(image_pull_secret),
            dcgm_exporter_port=dcgm_exporter_port,
            amd_exporter_port=amd_exporter_port,
        ),
        unrecognized=everything,
        assigned_user=flags.parse_option("--platform", flags.is_openshift, platform),
        group_restarts=allow_group_restarts,
    )
    wanted = command.Selection(
        frozenset(name or ()), command.parse_selector(selector) if selector is not None else ()
    )
    text, notes = command.inject_into_file(manifest or file or Path("-"), options, wanted)
    for note in notes:
        typer.echo(note, err=True)
    typer.echo(text.encode(), nl=False)


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Manifests to check.")],
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Manifest of the SupervisionPolicy for the workloads."),
    ] = None,
) -> None:
    """Check manifests without a cluster, and show what inject or a policy would do.

    Exit status 2: a file or an object of Plimsoll is invalid. 1: a workload would get no
    supervisor, or none gets one from the policy of --policy.
    """
    from plimsoll_cli.inject import validate as validation
    from plimsoll_operator.injection.options import InjectionOptions

    if policy is None:
        options = InjectionOptions("supervisor", fields=validation.INJECT_OPTION_NAMES)
    else:
        options = validation.name_pod_fields(_read_policy_options(policy, "supervisor"))
    found = validation.check_files(files, options)
    if policy is not None and not (found.num_supervised or found.refused):
        found.refused.append(
            f"{policy}: no workload in these files gets a supervisor from this policy"
        )
    for line in found.notes:
        typer.echo(line)
    for line in (*found.invalid, *found.refused):
        typer.echo(line, err=True)
    raise typer.Exit(found.exit_status)


# ``options`` that are set override the policy's settings.
def _merge_settings(policy: SupervisorSettings, **options: Any) -> SupervisorSettings:
    return policy.model_copy(update={key: one for key, one in options.items() if one})


def _is_option_set(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read_policy_options(file: Path, image: str) -> InjectionOptions:
    from plimsoll_cli.manifest import read_policy
    from plimsoll_operator.injection.options import OptionNames, make_options

    policy = read_policy(file)
    fields = OptionNames(
        engine=f"spec.engine.type in {file}",
        container=f"spec.engine.container in {file}",
        port=f"spec.engine.port in {file}",
        mode=f"spec.supervision.mode: Observe in {file}",
        unrecognized=f"spec.engine.type: custom in {file}, or --all,",
        exclude=f"spec.selector in {file}",
        host_budget=f"spec.memory.host.growthBudget in {file}",
        probe=f"spec.probe in {file}",
        resources=f"spec.supervisor.resources in {file}",
        selector=f"spec.selector in {file}",
    )
    # Without a namespace, the policy and the workloads are in the same one.
    stated = "namespace" in policy.metadata.model_fields_set
    return make_options(policy, image, fields, policy.metadata.namespace if stated else None)
