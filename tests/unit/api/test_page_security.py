"""Host headers as browsers and clients send them."""

from __future__ import annotations

import pytest

from plimsoll_api.page_security import is_ip_address, parse_host_name


@pytest.mark.parametrize(
    ("header", "name", "address"),
    [
        ("LocalHost:8080", "localhost", False),
        ("qwen.team-a.svc.", "qwen.team-a.svc", False),
        ("evil.example:80", "evil.example", False),
        ("x:evil.example", "x:evil.example", False),
        ("10.0.0.7:9404", "10.0.0.7", True),
        ("[fd00::7]:9404", "fd00::7", True),
        ("fd00::7", "fd00::7", True),
        ("", "", False),
    ],
)
def test_the_name_in_a_host_header(header: str, name: str, address: bool) -> None:
    assert parse_host_name(header) == name
    assert is_ip_address(name) is address
