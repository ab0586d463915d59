"""``spec.memory``: leak budgets of a replica, in bytes and seconds."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from plimsoll_api.cel import Rule, make_rule
from plimsoll_api.incidents import IncidentKind
from plimsoll_api.manifest import (
    DURATION_FORM,
    LIMIT_FORM,
    POSITIVE_DURATION_FORM,
    QUANTITY_SCHEMA,
    SIZE_FORM,
    FieldForm,
    FieldValues,
    PositiveBytes,
    PositiveSeconds,
    describe_field,
    make_size_rule,
)
from plimsoll_api.units import DAY_S, format_bytes

NEAR_LIMIT_RATIO = 0.95
"""Share of the memory limit above which a replica counts as near its limit, without reclaimable
memory."""
AUTO_BUDGET = "Auto"
"""Value of ``growthBudget`` for a learned budget."""
MAX_PROVISIONAL_BYTES = 2 << 30
PROVISIONAL_LIMIT_SHARE = 0.125
"""Share of the memory limit that is the budget until one has been learned, by choice: seldom
exhausted on the first day, but well below the limit."""


def compute_provisional_budget(limit_bytes: int | None) -> int:
    """Return the ``Auto`` budget in bytes that applies until a budget has been learned."""
    if limit_bytes is None:
        return MAX_PROVISIONAL_BYTES
    return max(1, min(MAX_PROVISIONAL_BYTES, int(PROVISIONAL_LIMIT_SHARE * limit_bytes)))


def _read_budget(value: Any) -> Any:
    if value == AUTO_BUDGET:
        return FieldValues(growth_bytes=MAX_PROVISIONAL_BYTES, auto=True)
    if isinstance(value, str) and value.lower() == AUTO_BUDGET.lower():
        raise ValueError(f"{value!r} is not a valid budget: write {AUTO_BUDGET}")
    return SIZE_FORM.read(value)


GROWTH_BUDGET_FORM = FieldForm(
    _read_budget,
    int,
    QUANTITY_SCHEMA | {"pattern": f"{QUANTITY_SCHEMA['pattern']}|^{AUTO_BUDGET}$"},
)


class MemoryBudget(msgspec.Struct, frozen=True):
    """Maximum unexplained growth within a window.

    If ``auto`` is true, the supervisor learns the budget. ``growth_bytes`` is then only for older
    supervisors, which cannot learn. ``limit_bytes`` is the memory limit.
    """

    growth_bytes: Annotated[
        PositiveBytes,
        describe_field(
            "Maximum unexplained growth of each replica within `window`, in bytes. At least "
            "1Mi. With `Auto`, the supervisor learns the budget from the service's past days, "
            "and restarts an engine only if memory would soon reach its limit "
            "(`spec.memory.auto`). To set no budget, omit the enclosing `host` or `device`.",
            make_size_rule("growthBudget", "; to set no budget, omit host or device", AUTO_BUDGET),
            name="growthBudget",
            form=GROWTH_BUDGET_FORM,
        ),
    ]
    window_s: Annotated[
        PositiveSeconds,
        describe_field(
            "Period over which growth is counted against the budget. Defaults to 24h.",
            name="window",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = DAY_S
    limit_bytes: Annotated[
        PositiveBytes | None,
        describe_field(
            "Memory, in bytes, at which the replica is killed. For host memory, defaults to the "
            "engine's memory limit. For device memory, defaults to the size of the device. At "
            "least 1Mi.",
            make_size_rule("limit"),
            name="limit",
            form=LIMIT_FORM,
        ),
    ] = None

    minimum_bytes: Annotated[
        PositiveBytes | None,
        describe_field(
            "Smallest budget, in bytes, that `growthBudget: Auto` may learn. It applies at once. "
            "Defaults to 3 % of the memory limit. At least 1Mi.",
            make_size_rule("minimum"),
            name="minimum",
            form=SIZE_FORM,
        ),
    ] = None
    auto: bool = False

    RULES: ClassVar[tuple[Rule, ...]] = (
        make_rule(
            "!has(self.minimum) || string(self.growthBudget) == 'Auto'",
            "minimum requires growthBudget: Auto",
            fieldPath=".minimum",
        ),
        make_rule(
            "!has(self.limit) || string(self.growthBudget) == 'Auto' || "
            "quantity(string(self.growthBudget)).compareTo(quantity(string(self.limit))) <= 0",
            "growthBudget must not be larger than limit",
            fieldPath=".growthBudget",
        ),
    )

    def __post_init__(self) -> None:
        if self.minimum_bytes is not None and not self.auto:
            raise ValueError(f"minimum requires growthBudget: {AUTO_BUDGET}")
        if self.auto and self.limit_bytes is not None:
            # Older supervisors reject a budget above the limit.
            msgspec.structs.force_setattr(
                self, "growth_bytes", min(self.growth_bytes, self.limit_bytes)
            )
        if self.limit_bytes is not None and self.growth_bytes > self.limit_bytes:
            raise ValueError(
                f"growthBudget ({format_bytes(self.growth_bytes)}) must not be larger than limit "
                f"({format_bytes(self.limit_bytes)})"
            )


class AutoBudgets(msgspec.Struct, frozen=True):
    """Settings of budgets with ``growthBudget: Auto``."""

    learning_s: Annotated[
        PositiveSeconds,
        describe_field(
            "Time for which each new service is observed before the supervisor acts on its growth. "
            "Defaults to 24h.",
            name="learning",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = DAY_S
    limit_within_s: Annotated[
        PositiveSeconds,
        describe_field(
            "The supervisor restarts an engine because of a leak only if memory would reach its "
            "limit within this time, at the present rate of growth. Defaults to 4h.",
            name="limitWithin",
            form=POSITIVE_DURATION_FORM,
        ),
    ] = 4 * 3600.0


def parse_growth_budget(text: str, window_s: float = DAY_S) -> MemoryBudget:
    """Parse a budget: a size or ``Auto``. Raises ValueError for other text."""
    value = GROWTH_BUDGET_FORM.read(text)
    parsed = value if isinstance(value, FieldValues) else {"growth_bytes": value}
    return MemoryBudget(window_s=window_s, **parsed)


class MemoryPolicy(msgspec.Struct, frozen=True):
    """Leak budgets for host and device memory.

    The supervisor also observes memory without a budget, but does not act on its growth.
    """

    host: Annotated[
        MemoryBudget | None,
        describe_field(
            "Growth budget for host memory. If unset, Plimsoll watches host memory but never acts "
            "on its growth."
        ),
    ] = None
    device: Annotated[
        MemoryBudget | None,
        describe_field(
            "Growth budget for device memory. If unset, Plimsoll watches device memory but never "
            "acts on its growth."
        ),
    ] = None
    shared_device: Annotated[
        bool,
        describe_field(
            "Whether other pods use the same devices, for example with time-slicing or MPS. If "
            "true, Plimsoll judges only the memory of the engine's own allocator, because "
            "another pod may cause the growth of a device's memory. Plimsoll also detects shared "
            "devices by itself: by other users of a device, and by the names of resources and "
            "claims. Defaults to false."
        ),
    ] = False
    warmup_s: Annotated[
        float,
        msgspec.Meta(ge=0),
        describe_field(
            "Time after each engine start during which growth is treated as warm-up and not "
            "counted against a budget. Defaults to 1m.",
            name="warmup",
            form=DURATION_FORM,
        ),
    ] = 60.0
    auto: Annotated[
        AutoBudgets,
        describe_field("Settings for budgets with `growthBudget: Auto`."),
    ] = AutoBudgets()

    @property
    def has_auto_budget(self) -> bool:
        """Whether any budget is learned."""
        return any(one is not None and one.auto for one in (self.host, self.device))

    def get_auto_budget(self, kind: IncidentKind) -> MemoryBudget | None:
        """Return the budget for incidents of ``kind`` if it is learned; None otherwise."""
        budgets = {IncidentKind.HOST_GROWTH: self.host, IncidentKind.DEVICE_GROWTH: self.device}
        budget = budgets.get(kind)
        return budget if budget is not None and budget.auto else None
