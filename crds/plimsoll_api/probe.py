"""``spec.probe``: the probe that the operator loads into an engine's Python processes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from plimsoll_api.cel import make_rule
from plimsoll_api.engines import EngineType
from plimsoll_api.manifest import describe_field
from plimsoll_api.serving import Engine

PYTHONPATH = "PYTHONPATH"

Image = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class InjectedProbe(msgspec.Struct, frozen=True):
    """Probe for the pods of a policy, whose image the operator's administrator chooses."""

    enabled: Annotated[
        bool,
        describe_field(
            "Whether to load the probe into the engine's Python processes. The probe reports "
            "Python's, malloc's and torch's memory, the KV cache and the known caches of each "
            "process, and can trim them. Not for a `plimsoll` engine, which reports all of this "
            "itself. Defaults to false."
        ),
    ] = False


class Probe(InjectedProbe, frozen=True):
    """Probe for the pods of a service, which may set the probe's image."""

    image: Annotated[
        Image | None,
        describe_field(
            "Container image that holds the probe's code. Defaults to the image in the operator's "
            "`--probe-image`, or else to the supervisor's image."
        ),
    ] = None


ADMIN_PROTOCOL_MESSAGE = (
    "probe.enabled must be false for an engine that speaks the admin protocol (engine.type "
    "plimsoll, or engine.adminContract Plimsoll): such an engine reports its memory itself"
)
PYTHONPATH_MESSAGE = (
    f"engine.env: with probe.enabled, {PYTHONPATH} must have a value, not valueFrom: the operator "
    "appends the probe's folder to it"
)


def explain_refused_probe(probe: Probe, engine: Engine) -> str | None:
    """Return why the probe cannot be loaded into ``engine``; None if it can."""
    if not probe.enabled:
        return None
    if engine.type is EngineType.PLIMSOLL or engine.admin_contract == "Plimsoll":
        return ADMIN_PROTOCOL_MESSAGE
    if any(one.name == PYTHONPATH and one.value_from is not None for one in engine.env):
        return PYTHONPATH_MESSAGE
    return None


PROBE_RULES = (
    make_rule(
        "!self.probe.enabled || "
        "(self.engine.type != 'plimsoll' && self.engine.adminContract != 'Plimsoll')",
        ADMIN_PROTOCOL_MESSAGE,
        fieldPath=".probe",
    ),
    make_rule(
        "!self.probe.enabled || !has(self.engine.env) || "
        f"!self.engine.env.exists(one, one.name == '{PYTHONPATH}' && has(one.valueFrom))",
        PYTHONPATH_MESSAGE,
        fieldPath=".engine.env",
    ),
)
"""CEL rules that reject the same specs as :func:`explain_refused_probe`."""
