"""``spec.supervision.maintenanceWindow``: when the supervisor performs restarts that can wait."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from plimsoll_api.cel import make_rule, make_validations
from plimsoll_api.manifest import POSITIVE_DURATION_FORM, FieldForm, describe_field
from plimsoll_api.units import DAY_S


class Weekday(StrEnum):
    """Day of the week; Monday, the first member, has the number 0."""

    MONDAY = "Monday"
    TUESDAY = "Tuesday"
    WEDNESDAY = "Wednesday"
    THURSDAY = "Thursday"
    FRIDAY = "Friday"
    SATURDAY = "Saturday"
    SUNDAY = "Sunday"


_EPOCH_WEEKDAY = list(Weekday).index(Weekday.THURSDAY)
"""Weekday of the Unix epoch: 1 January 1970 was a Thursday."""
_TIME_OF_DAY_PATTERN = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"


def _read_time_of_day(value: Any) -> float:
    if not isinstance(value, str) or not re.match(_TIME_OF_DAY_PATTERN.replace("$", r"\Z"), value):
        raise ValueError("must be a time of day in UTC in the format HH:MM")
    hours, minutes = map(int, value.split(":"))
    return 3600.0 * hours + 60.0 * minutes


def _write_time_of_day(seconds: float) -> str:
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours:02d}:{minutes:02d}"


def _read_within_a_day(value: Any) -> float:
    seconds: float = POSITIVE_DURATION_FORM.read(value)
    if seconds > DAY_S:
        raise ValueError("must be at most 24h")
    return seconds


def _read_weekdays(value: Any) -> tuple[int, ...]:
    known = list(Weekday)
    if not isinstance(value, list) or any(day not in known for day in value):
        raise ValueError(f"must contain only {', '.join(known)}")
    return tuple(sorted({known.index(Weekday(day)) for day in value}))


TIME_OF_DAY_FORM = FieldForm(
    _read_time_of_day, _write_time_of_day, {"type": "string", "pattern": _TIME_OF_DAY_PATTERN}
)
WITHIN_A_DAY_FORM = POSITIVE_DURATION_FORM._replace(
    read=_read_within_a_day,
    schema=POSITIVE_DURATION_FORM.schema
    | make_validations(
        make_rule(
            "duration(self) > duration('0s') && duration(self) <= duration('24h')",
            "duration must be greater than 0 and at most 24h",
        )
    ),
)
WEEKDAYS_FORM = FieldForm(
    _read_weekdays,
    lambda days: [list(Weekday)[day].value for day in days],
    {
        "type": "array",
        "items": {"type": "string", "enum": [day.value for day in Weekday]},
        "maxItems": 7,
    },
)


class MaintenanceWindow(msgspec.Struct, frozen=True):
    """Time for restarts that can wait.

    The window opens ``start_s`` seconds after midnight UTC on ``days``, which are numbers from 0
    for Monday; without ``days``, it opens every day.
    """

    start_s: Annotated[
        float,
        msgspec.Meta(ge=0, lt=86_400),
        describe_field(
            "Time of day, in UTC, at which the window opens: HH:MM.",
            name="start",
            form=TIME_OF_DAY_FORM,
        ),
    ]
    duration_s: Annotated[
        float,
        msgspec.Meta(gt=0, le=86_400),
        describe_field(
            "Time for which the window stays open. At most 24h. Defaults to 4h.",
            name="duration",
            form=WITHIN_A_DAY_FORM,
        ),
    ] = 4 * 3600.0
    days: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=6)], ...],
        describe_field(
            "Days on which the window opens. If empty, it opens every day.", form=WEEKDAYS_FORM
        ),
    ] = ()

    def compute_seconds_until_open(self, now: float) -> float:
        """Return the seconds from the Unix time ``now`` until the window opens; 0 if it is open."""
        today = int(now // DAY_S)
        # Begin with yesterday, whose window may still be open.
        for day in range(today - 1, today + 8):
            start = day * DAY_S + self.start_s
            if self.days and (day + _EPOCH_WEEKDAY) % 7 not in self.days:
                continue
            if now < start + self.duration_s:
                return max(0.0, start - now)
        raise AssertionError("the maintenance window has no valid day")

    @property
    def opens_at(self) -> str:
        """Opening time as ``HH:MM UTC``."""
        return f"{_write_time_of_day(self.start_s)} UTC"
