"""The client of an engine's server: what it asks of urllib3."""

from __future__ import annotations

import pytest

from plimsoll_sidecar.clients.http import HttpClient


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:8000/"])
def test_a_plain_connection_gets_no_option_of_tls(url: str) -> None:
    # urllib3 2.2, which the package allows, refuses assert_hostname there with a TypeError.
    assert "assert_hostname" not in HttpClient(url)._pool().connection_pool_kw


def test_the_name_in_a_certificate_is_not_compared() -> None:
    options = HttpClient("https://127.0.0.1:8000")._pool().connection_pool_kw
    assert options["assert_hostname"] is False
