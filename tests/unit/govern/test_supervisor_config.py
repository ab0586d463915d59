"""The configuration file: a broken new one keeps the old one.

Tests ``plimsoll_sidecar/config.py``.
"""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from plimsoll_api import supervisor_config
from plimsoll_api.engines import EngineType
from plimsoll_api.names import POLICY_KIND
from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervisor_config import (
    POD_ENGINE_ENV,
    EngineEndpoint,
    PodEngine,
    ServiceRef,
    SupervisorConfig,
)
from plimsoll_sidecar.config import ConfigError, ConfigFile


def config(mode: Mode) -> SupervisorConfig:
    return SupervisorConfig(
        service=ServiceRef(name="tiny"),
        engine=EngineEndpoint(
            type=EngineType.PLIMSOLL,
            admin_url="http://127.0.0.1:8001",
            serving_url="http://127.0.0.1:8000",
        ),
        supervision=Supervision(mode=mode),
    )


def test_a_change_is_taken_over_and_a_broken_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "supervisor.json"
    path.write_bytes(supervisor_config.encode_config(config(Mode.OBSERVE)))
    file = ConfigFile(path)
    assert not file.reload()
    path.write_text('{"service": {"name": "tiny"}, "engine": 7}')
    assert not file.reload()
    assert file.error is not None
    assert "supervisor.json" in file.error
    assert "$.engine" in file.error
    assert file.current.supervision.mode is Mode.OBSERVE
    path.write_bytes(b'{"service": {"name": "\xff"}}')
    assert not file.reload()
    assert file.error is not None
    assert "invalid start byte" in file.error
    path.write_bytes(supervisor_config.encode_config(config(Mode.RECOVER)))
    assert file.reload()
    assert file.error is None
    assert file.current.supervision.mode is Mode.RECOVER


def test_without_its_file_a_supervisor_goes_on_watching_and_does_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet empties the volume when somebody deletes the ConfigMap."""
    path = tmp_path / "supervisor.json"
    path.write_bytes(supervisor_config.encode_config(config(Mode.RECOVER)))
    file = ConfigFile(path)
    path.unlink()
    assert file.reload()
    assert file.is_missing
    assert file.error is not None
    assert file.error.startswith("the supervisor only observes, because it has no configuration")
    assert file.current == config(Mode.OBSERVE)
    assert not file.reload()
    path.write_text("{")
    assert not file.reload()
    assert file.current.supervision.mode is Mode.OBSERVE
    path.unlink()
    assert not file.reload()
    path.write_bytes(supervisor_config.encode_config(config(Mode.RECOVER)))
    assert file.reload()
    assert file.error is None
    assert not file.is_missing
    assert file.current == config(Mode.RECOVER)
    assert len(caplog.records) == 3, "each state is logged once"


def test_a_pod_of_a_policy_has_an_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, url = tmp_path / "supervisor.json", "http://127.0.0.1:30000"
    own = EngineEndpoint(type=EngineType.SGLANG, admin_url=url, serving_url=url, container="server")
    monkeypatch.setenv(POD_ENGINE_ENV, msgspec.json.encode(PodEngine(own)).decode())
    path.write_bytes(supervisor_config.encode_config(config(Mode.OBSERVE)))
    file = ConfigFile(path)
    assert file.current.engine.type is EngineType.PLIMSOLL, "an InferenceService says all itself"

    of_policy = replace(config(Mode.RECOVER), service=ServiceRef("engines", kind=POLICY_KIND))
    path.write_bytes(supervisor_config.encode_config(of_policy))
    assert file.reload()
    assert file.current.engine == own
    assert file.current.supervision.mode is Mode.RECOVER
    assert not file.reload(), "the same file in the same pod is no change"

    monkeypatch.setenv(POD_ENGINE_ENV, '{"engine": {"type": "magic"}}')
    assert not file.reload()
    assert file.error is not None
    assert POD_ENGINE_ENV in file.error
    assert "$.engine" in file.error
    assert file.current.engine == own


@pytest.mark.parametrize("text", [None, "{"])
def test_a_pod_that_starts_without_a_file_watches_the_engine_that_admission_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path, url = tmp_path / "supervisor.json", "http://127.0.0.1:30000"
    if text is not None:
        path.write_text(text)
    own = EngineEndpoint(type=EngineType.SGLANG, admin_url=url, serving_url=url, container="server")
    monkeypatch.setenv("POD_NAME", "chat-0")
    monkeypatch.setenv("POD_NAMESPACE", "team")
    monkeypatch.setenv(POD_ENGINE_ENV, msgspec.json.encode(PodEngine(own)).decode())
    file = ConfigFile(path)
    assert file.is_missing
    assert file.error is not None
    assert "supervisor.json" in file.error
    found = file.current
    assert (found.engine, found.service) == (own, ServiceRef("chat-0", "team"))
    assert found.supervision.mode is Mode.OBSERVE
    assert (found.slots, found.memory.host, found.memory.device) == ((), None, None)

    monkeypatch.setenv(POD_ENGINE_ENV, "garbage")
    assert ConfigFile(path).current.engine.type is EngineType.CUSTOM
    path.write_bytes(supervisor_config.encode_config(config(Mode.RECOVER)))
    assert file.reload()
    assert file.error is None
    assert not file.is_missing
    assert file.current == config(Mode.RECOVER)


def test_a_first_file_that_is_absent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json"):
        ConfigFile(tmp_path / "absent.json")


def test_a_field_of_a_newer_operator_is_left_aside(tmp_path: Path) -> None:
    """An upgrade of the operator rolls no pod, and its configuration must go on arriving."""
    path = tmp_path / "supervisor.json"
    path.write_bytes(supervisor_config.encode_config(config(Mode.OBSERVE)))
    file = ConfigFile(path)
    newer = supervisor_config.encode_config(config(Mode.RECOVER)).replace(
        b'"mode"', b'"newer": [1], "mode"'
    )
    path.write_bytes(newer)
    assert file.reload()
    assert file.current.supervision.mode is Mode.RECOVER
