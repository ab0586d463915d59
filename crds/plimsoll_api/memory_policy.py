"""``spec.memory``: the growth budgets of a replica, in bytes and seconds."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from plimsoll_api.cel import Rule, rule
from plimsoll_api.manifest import (
    DURATION,
    POSITIVE_BYTES,
    POSITIVE_DURATION,
    PositiveBytes,
    PositiveSeconds,
    written,
)
from plimsoll_api.units import DAY_S, format_bytes

NEAR_LIMIT_RATIO = 0.95
"""Share of a memory limit in use, without what the kernel can reclaim, that counts as near it."""


class MemoryBudget(msgspec.Struct, frozen=True):
    """Unexplained growth allowed within a window. ``limit_bytes`` is the container's limit."""

    growth_bytes: Annotated[
        PositiveBytes,
        written(
            "Unexplained growth, in bytes, that each replica may show within `window`. Must be more"
            " than 0. To set no budget, omit the enclosing `host` or `device`.",
            rule(
                "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))",
                "growthBudget must be more than 0; leave host or device out for no budget",
            ),
            name="growthBudget",
            form=POSITIVE_BYTES,
        ),
    ]
    window_s: Annotated[
        PositiveSeconds,
        written(
            "Period over which growth is counted against the budget. Defaults to 24h.",
            name="window",
            form=POSITIVE_DURATION,
        ),
    ] = DAY_S
    limit_bytes: Annotated[
        PositiveBytes | None,
        written(
            "Memory, in bytes, at which the replica is killed. For host memory, defaults to the "
            "engine's memory limit. For device memory, defaults to the size of the device.",
            name="limit",
            form=POSITIVE_BYTES,
        ),
    ] = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        rule(
            "!has(self.limit) || quantity(string(self.growthBudget))"
            ".compareTo(quantity(string(self.limit))) <= 0",
            "growthBudget must not be larger than limit",
            fieldPath=".growthBudget",
        ),
    )

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.growth_bytes > self.limit_bytes:
            raise ValueError(
                f"growthBudget ({format_bytes(self.growth_bytes)}) must not be larger than limit "
                f"({format_bytes(self.limit_bytes)})"
            )


class MemoryPolicy(msgspec.Struct, frozen=True):
    """Budgets for host and device memory; memory without a budget is watched, never acted on."""

    host: Annotated[
        MemoryBudget | None,
        written(
            "Growth budget for host memory. If unset, Plimsoll watches host memory but never acts "
            "on its growth."
        ),
    ] = None
    device: Annotated[
        MemoryBudget | None,
        written(
            "Growth budget for device memory. If unset, Plimsoll watches device memory but never "
            "acts on its growth."
        ),
    ] = None
    shared_device: Annotated[
        bool,
        written(
            "Whether other pods use the same devices, for example with time-slicing or MPS. If "
            "true, Plimsoll judges only the memory that the engine's own allocator holds, because "
            "growth of the whole device may come from another pod. Plimsoll also detects other "
            "users itself, and reads it from the names of resources and from claims. Defaults to "
            "false."
        ),
    ] = False
    warmup_s: Annotated[
        float,
        msgspec.Meta(ge=0),
        written(
            "Time after each engine start during which growth is treated as warm-up and not "
            "counted against a budget. Defaults to 1m.",
            name="warmup",
            form=DURATION,
        ),
    ] = 60.0
