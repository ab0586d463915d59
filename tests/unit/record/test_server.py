"""The names by which a supervisor's page may be asked."""

from pathlib import Path

import pytest

from plimsoll_sidecar.record.server import ALLOWED_HOSTS_ENV, AllowedHosts, read_cluster_domains

HOSTS = AllowedHosts("qwen-5d-x", "qwen", "team-a", ["cluster.local"], ["plimsoll.example", " "])


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:9464", "page.localhost:1", "127.0.0.1:9464", "10.1.2.3", "[::1]:80",
        "[fd00::7]", "::1", "qwen", "qwen-5d-x:9464", "qwen.team-a", "qwen.team-a.svc:9464",
        "qwen.team-a.svc.cluster.local.", "plimsoll.example:443", None,
    ],
)  # fmt: skip
def test_own_names_and_addresses_are_answered(host: str | None) -> None:
    assert HOSTS.explain_refusal(host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:9464", "localhost.evil.example", "127.0.0.1.evil.example",
        "qwen.team-a.svc.evil.example", "qwen.team-b.svc", "xqwen", "", ".", "[evil.example]:80",
        "127.0.0.1:80:80", "evil.example:localhost",
    ],
)  # fmt: skip
def test_others_are_refused_with_what_to_do(host: str) -> None:
    reason = HOSTS.explain_refusal(host)
    assert reason is not None
    assert repr(host) in reason
    assert "qwen.team-a.svc" in reason
    assert ALLOWED_HOSTS_ENV in reason


def test_a_long_name_makes_no_long_message() -> None:
    reason = HOSTS.explain_refusal("a" * 10_000)
    assert reason is not None
    assert len(reason) < 600


def test_the_clusters_domain_is_the_resolvers(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_bytes(b"nameserver 10.0.0.10\nsearch ns.svc.corp.x svc.corp.x corp.x \xff\n")
    assert read_cluster_domains(file) == ["corp.x"]
    assert read_cluster_domains(tmp_path / "absent") == []
