"""``act/adapters/kv_transfer.py``: how long an engine holds KV blocks for another one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.engines import EngineType
from plimsoll_sidecar.act.adapters.kv_transfer import (
    MAX_LEASE_S,
    can_test_with_connector,
    find_restart_blocker,
    read_connector_name,
    read_kv_lease_s,
)

VLLM, SGLANG = EngineType.VLLM, EngineType.SGLANG


def vllm(config: object, **environment: str) -> float | None:
    words = ["python", "vllm", "serve", "m", "--kv-transfer-config", json.dumps(config)]
    return read_kv_lease_s(VLLM, words, environment.get)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_nixl_holds_blocks_for_either_role(role: str) -> None:
    """Deployments of llm-d use ``kv_both`` for prefill and decode."""
    assert vllm({"kv_connector": "NixlConnector", "kv_role": role}) == 480


def test_a_longer_lease_or_timeout_counts() -> None:
    nixl = {"kv_connector": "NixlPullConnector", "kv_role": "kv_both"}
    assert vllm(nixl | {"kv_connector_extra_config": {"kv_lease_duration": 900}}) == 900
    assert vllm(nixl | {"kv_connector_extra_config": {"decoder_kv_blocks_ttl": 600}}) == 600
    assert vllm(nixl, VLLM_NIXL_ABORT_REQUEST_TIMEOUT="1200") == 1200
    assert vllm(nixl, VLLM_NIXL_ABORT_REQUEST_TIMEOUT="no number") == 480
    assert vllm(nixl, VLLM_NIXL_ABORT_REQUEST_TIMEOUT="inf") == MAX_LEASE_S
    assert vllm(nixl, VLLM_NIXL_ABORT_REQUEST_TIMEOUT="nan") == 480
    mooncake = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
    assert vllm(mooncake, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT="60") == 60
    assert vllm({"kv_connector": "MoRIIOConnector", "kv_role": "kv_producer"}) == 3600


def test_a_connector_that_holds_nothing_for_others_has_no_lease() -> None:
    assert vllm({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}) is None
    assert vllm({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}) is None
    assert read_kv_lease_s(VLLM, ["vllm", "serve", "m"]) is None
    assert read_kv_lease_s(EngineType.CUSTOM, ["x", "--disaggregation-mode=prefill"]) is None


def test_an_unknown_producer_is_given_time() -> None:
    assert vllm({"kv_connector": "OurOwn", "kv_role": "kv_producer"}) == 480
    assert vllm({"kv_connector": "OurOwn", "kv_role": "kv_both"}) is None


def test_of_several_connectors_the_longest_time_counts() -> None:
    several = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}]
    extra = {"connectors": several}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    assert vllm(config | {"kv_connector_extra_config": extra}) == 480


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'],
        ['--kv-transfer-config={"kv_connector": "NixlConnector"}'],
        ['--kv_transfer_config={"kv_connector": "NixlConnector"}'],
        ["--kv-transfer-config.kv_connector", "NixlConnector"],
        [
            '--kv-transfer-config={"kv_connector": "NixlConnector", "engine_id": "a 8g \\" 8g",'
            ' "kv_connector_extra_config": {"cpu_bytes_to_use": 80g, "n": [1.5M]}}'
        ],
        ["--kv-transfer-config.kv_connector=NixlConnector", "--kv-transfer-config.kv_role=kv_both"],
    ],
)
def test_every_spelling_of_the_argument_is_read(words: list[str]) -> None:
    assert read_kv_lease_s(VLLM, ["vllm", "serve", "m", *words]) == 480


def test_the_last_of_two_arguments_counts() -> None:
    twice = ["--kv-transfer-config={}", '--kv-transfer-config={"kv_connector":"NixlConnector"}']
    assert read_kv_lease_s(VLLM, twice) == 480
    assert read_kv_lease_s(VLLM, twice[::-1]) is None


def test_sglang_tells_it_by_its_mode() -> None:
    serve = ["python", "-m", "sglang.launch_server"]
    assert read_kv_lease_s(SGLANG, [*serve, "--disaggregation-mode", "prefill"]) == 300
    assert read_kv_lease_s(SGLANG, [*serve, "--disaggregation-mode=decode"]) == 300
    assert read_kv_lease_s(SGLANG, [*serve, "--disaggregation-mode=null"]) is None
    assert read_kv_lease_s(SGLANG, serve) is None
    waiting = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "900"}.get
    assert read_kv_lease_s(SGLANG, [*serve, "--disaggregation-mode=prefill"], waiting) == 900


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.just("NixlConnector"),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(
                ["kv_connector", "kv_role", "kv_connector_extra_config", "connectors",
                 "kv_lease_duration", "decoder_kv_blocks_ttl"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON, st.text())
def test_no_argument_is_an_error(config: object, variable: str) -> None:
    found = vllm(config, VLLM_NIXL_ABORT_REQUEST_TIMEOUT=variable)
    assert found is None or 0 < found <= MAX_LEASE_S
    found = read_kv_lease_s(VLLM, ["--kv-transfer-config", variable], lambda name: variable)
    assert found is None or 0 < found <= MAX_LEASE_S


@pytest.mark.parametrize(
    ("version", "tied"),
    [
        ("0.24.0", True), ("0.26.1rc1.dev77+g6f91edf96", True), ("0.27.0", False),
        ("0.32.0", False), ("1.0", False), ("", False), ("dev", False), ("9" * 64, False),
        ("0.1.dev1+g6f91edf96", False), ("0.1.dev19387+g6f91edf96.d20261129", False),
    ],
)  # fmt: skip
def test_versions_that_do_not_connect_again_are_not_restarted_alone(
    version: str, tied: bool
) -> None:
    found = find_restart_blocker("NixlConnector", version)
    assert (found is not None) is tied
    assert found is None or ("together" in found and version in found)
    assert find_restart_blocker("MooncakeConnector", version) is None, "nothing is known of it"
    assert find_restart_blocker("", version) is None


def test_the_connector_that_uses_nixl_is_found_among_others() -> None:
    nested = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlPullConnector"}]
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": nested},
    }
    for config, name in (
        (several, "NixlPullConnector"),
        ({"kv_connector": "MooncakeConnector"}, "MooncakeConnector"),
    ):
        words = ["vllm", "serve", f"--kv-transfer-config={json.dumps(config)}"]
        assert read_connector_name(VLLM, words) == name
        assert can_test_with_connector(name) is name.startswith("Nixl")
    assert read_connector_name(VLLM, ["vllm", "serve"]) == read_connector_name(SGLANG, words) == ""
