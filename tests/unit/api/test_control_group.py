"""The listing of a process's control groups (``plimsoll_api/control_group.py``)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.control_group import parse_memory_group

V1 = "12:cpu,cpuacct:/a\n9:memory:/kubepods/pod:1/x\n1:name=systemd:/s\n"


@pytest.mark.parametrize(
    ("listing", "group"),
    [
        ("0::/kubepods/pod1/x\n", (2, "/kubepods/pod1/x")),
        ("0::/\n", (2, "/")),
        (V1, (1, "/kubepods/pod:1/x")),
        (V1 + "0::/init.scope\n", (1, "/kubepods/pod:1/x")),
        ("0::/init.scope\n" + V1, (1, "/kubepods/pod:1/x")),
        ("5:cpuset,memory:/m\n", (1, "/m")),
        ("4:cpu:/a\n1:name=memory-like:/s\n", None),
        ("", None),
        ("nonsense\n::\n", (2, "")),
        ("no colons\n7:\n", None),
    ],
)
def test_the_memory_controller_s_group_is_found(
    listing: str, group: tuple[int, str] | None
) -> None:
    assert parse_memory_group(listing) == group


@given(listing=st.text())
def test_any_text_is_read(listing: str) -> None:
    found = parse_memory_group(listing)
    assert found is None or (found.version in (1, 2) and found.path in listing)
