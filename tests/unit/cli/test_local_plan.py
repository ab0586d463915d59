"""Local mode runs what the renderer writes, with this machine's paths and ports.

Tests ``local/plan.py`` and ``local/model.py``.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_api.names import MAKE_CHECKPOINT_ANNOTATION
from plimsoll_api.supervision import Mode
from plimsoll_cli.errors import UsageError
from plimsoll_cli.local import model, plan, runner

ROOT = Path("/srv/local")
PORTS = (8000, 21001, 21002, 21003)


def service(**spec: object) -> InferenceService:
    return InferenceService.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "tiny", "uid": "4f0d", "annotations": {}},
            "spec": {
                "model": {"uri": "file:///models/tiny"},
                "memory": {"host": {"growthBudget": "256Mi"}, "warmup": "15s"},
                "supervision": {"mode": "Recover"},
            }
            | spec,
        }
    )


def make(one: InferenceService, environ: dict[str, str] | None = None) -> plan.Plan:
    return plan.plan_replica(one, ROOT, PORTS, Path("/models/tiny"), environ or {})


def test_the_engine_gets_local_places() -> None:
    argv = make(service()).engine.argv

    assert argv[1:4] == ("-m", "plimsoll_engine", "serve")
    for flag in (
        "--model=/models/tiny", "--served-model-name=tiny", "--host=127.0.0.1", "--port=8000",
        "--admin-port=21001", "--run-dir=/srv/local/run",
    ):  # fmt: skip
        assert flag in argv


def test_the_supervisor_gets_the_same_configuration_as_in_a_cluster() -> None:
    made = make(service())

    assert made.supervisor.argv[2] == "plimsoll_sidecar.launcher"
    assert "--config=/srv/local/etc/supervisor.json" in made.supervisor.argv
    assert "--metrics-port=21002" in made.supervisor.argv
    assert made.config.engine.admin_url == "http://127.0.0.1:21001"
    assert made.config.supervision.mode is Mode.RECOVER
    assert made.config.memory.warmup_s == 15
    assert made.config.memory.host is not None
    assert made.config.memory.host.growth_bytes == 256 << 20


def test_a_manifest_from_a_cluster_loses_its_uid_here() -> None:
    made = make(service())

    assert made.config.service.uid == ""
    assert made.config.slots == ()


def test_children_know_no_cluster_and_only_the_manifests_faults() -> None:
    outer = {
        "PATH": "/bin",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "PLIMSOLL_INJECT": "append_list",
    }
    env = [{"name": "OMP_NUM_THREADS", "value": "2"}]

    made = make(service(engine={"env": env}), outer)

    assert made.engine.env == {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
    assert made.supervisor.env["POD_NAME"] == "tiny"
    assert "KUBERNETES_SERVICE_HOST" not in made.supervisor.env


def test_a_variable_from_a_secret_needs_a_cluster() -> None:
    env = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]

    with pytest.raises(
        UsageError, match=r"spec\.engine\.env\[0\]\.valueFrom: KEY can only be read in a cluster"
    ):
        make(service(engine={"env": env}))


def test_what_has_no_effect_here_is_said() -> None:
    lines = plan.list_ignored_fields(service(replicas=3, podTemplate={"spec": {}}))

    assert any("spec.replicas is 3" in line for line in lines)
    assert any("spec.podTemplate" in line for line in lines)
    assert plan.list_ignored_fields(service()) == []


def test_wanted_ports_are_taken_where_they_are_free() -> None:
    free = runner.choose_free_ports([0, 0])  # any

    assert runner.choose_free_ports(free) == free


def test_a_port_in_use_is_replaced_and_all_differ() -> None:
    with socket.socket() as listener:
        listener.bind((plan.LOOPBACK_ADDRESS, 0))
        listener.listen(1)
        taken = listener.getsockname()[1]

        chosen = runner.choose_free_ports([taken] * 4)

    assert taken not in chosen
    assert len(set(chosen)) == 4
    assert all(port in runner.PORT_RANGE for port in chosen)


def test_a_checkpoint_directory_is_used_as_it_is(tmp_path: Path) -> None:
    one = service(model={"uri": f"file://{tmp_path}"})

    assert model.locate_checkpoint(one, ROOT) == (tmp_path, False)


def annotated(wish: str) -> InferenceService:
    one = service(model={"uri": "file:///nowhere/at/all"})
    meta = one.metadata.model_copy(update={"annotations": {MAKE_CHECKPOINT_ANNOTATION: wish}})
    return one.model_copy(update={"metadata": meta})


def test_the_tiny_checkpoint_is_made_only_once(tmp_path: Path) -> None:
    folder, absent = model.locate_checkpoint(annotated("tiny"), tmp_path)
    assert absent

    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")

    assert model.locate_checkpoint(annotated("tiny"), tmp_path) == (folder, False)


def test_a_model_of_the_hub_is_downloaded_only_once(tmp_path: Path) -> None:
    one = service(model={"uri": "hf://org/tiny", "revision": "refs/pr/1"})
    folder, absent = model.locate_checkpoint(one, tmp_path)
    assert (folder, absent) == (tmp_path / "models" / "org" / "tiny" / "refs--pr--1", True)
    folder.mkdir(parents=True)
    (folder / model.COMPLETE_MARKER_FILE).touch()
    assert model.locate_checkpoint(one, tmp_path) == (folder, False)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (
            service(model={"uri": "pvc://weights/qwen"}),
            "pvc://weights/qwen can only be used",
        ),
        (service(model={"uri": "file:///nowhere/at/all"}), "/nowhere/at/all is not a directory"),
        (annotated("huge"), "'huge' is not supported: set the value to tiny"),
    ],
)
def test_a_model_that_is_not_here_is_named(one: InferenceService, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        model.locate_checkpoint(one, ROOT)
