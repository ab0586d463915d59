"""Parse the options of ``plimsoll inject``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from plimsoll_api.memory_policy import MemoryBudget, parse_growth_budget
from plimsoll_api.resources import Resources
from plimsoll_api.serving import SecretName
from plimsoll_api.supervision import Mode
from plimsoll_api.supervision_policy import SUPERVISOR_PORTS, SelectedEngineType
from plimsoll_cli.errors import UsageError
from plimsoll_cli.manifest import describe_problem

T = TypeVar("T")


def parse_option(flag: str, read: Callable[[Any], T], text: Any) -> T:
    """Return what ``read`` makes of the value ``text`` of ``flag``. Raises UsageError."""
    try:
        return read(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def parse_budget(flag: str, text: str | None, window_s: float) -> MemoryBudget | None:
    """Return the leak budget; None if the option is not set. Raises UsageError."""
    if text is None:
        return None
    return parse_option(flag, lambda given: parse_growth_budget(given, window_s), text)


def parse_type(text: str) -> SelectedEngineType:
    """Return the type of the engine. Raises ValueError."""
    if text not in list(SelectedEngineType):
        raise ValueError(
            f"{text!r} is not an engine type: use one of {', '.join(SelectedEngineType)}"
        )
    return SelectedEngineType(text)


def parse_mode(text: str) -> Mode:
    """Return the mode. Raises ValueError."""
    if text not in list(Mode):
        raise ValueError(f"{text!r} is not a mode: use {' or '.join(Mode)}")
    return Mode(text)


def check_port(port: int | None) -> int | None:
    """Return ``port``. Raises ValueError if the supervisor needs it."""
    if port in SUPERVISOR_PORTS:
        raise ValueError(
            f"port {port} is reserved for the supervisor: choose another port for the engine"
        )
    return port


def check_image(image: str) -> None:
    """Raise ValueError if ``image`` cannot be the name of an image."""
    if not image or image != "".join(image.split()):
        raise ValueError(
            f"{image!r} is not a container image: use a name such as"
            " registry.example/team/plimsoll-supervisor:TAG"
        )


def is_openshift(platform: str | None) -> bool:
    """Report whether the platform chooses the pods' users. Raises ValueError."""
    if platform not in (None, "openshift"):
        raise ValueError(
            f"{platform!r} is not a supported platform: use openshift, or omit the option"
        )
    return platform is not None


def parse_resources(requests: str | None, limits: str | None) -> Resources | None:
    """Return the supervisor's resources; None if no option sets them. Raises UsageError.

    The syntax is that of kubectl: ``cpu=20m,memory=96Mi``.
    """
    if requests is None and limits is None:
        return None
    given: dict[str, dict[str, str]] = {}
    for field, text in (("requests", requests or ""), ("limits", limits or "")):
        amounts = [one for one in text.split(",") if one]
        for one in amounts:
            if "=" not in one:
                raise UsageError(
                    f"--supervisor-{field}: {one!r} has no amount: use NAME=AMOUNT, for example"
                    " memory=256Mi"
                )
        given[field] = dict(one.partition("=")[::2] for one in amounts)
    try:
        return Resources.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        flag = first["loc"][0] if first["loc"] else "requests"
        raise UsageError(f"--supervisor-{flag}: {describe_problem(first)}") from None


def parse_secrets(names: list[str] | None) -> list[SecretName]:
    """Return the names of Secrets. Raises UsageError."""
    try:
        return [SecretName(name=one) for one in names or ()]
    except ValidationError as error:
        problem = describe_problem(error.errors()[0])
        raise UsageError(f"--image-pull-secret: {problem}") from None
