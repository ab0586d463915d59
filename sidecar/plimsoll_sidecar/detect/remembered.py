"""What a detector must remember over a restart of the supervisor: where growth is measured from."""

from __future__ import annotations

import msgspec

from plimsoll_sidecar.detect.trend import Point


class Remembered(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bases of one epoch: host and device, one for each class of load, and each role's size
    (anonymous, and shared).

    Without them a new detector would take memory that has leaked for its baseline.
    """

    host: list[Point] = []
    device: list[Point] = []
    roles: dict[str, int] = {}
    shared_roles: dict[str, int] = {}
