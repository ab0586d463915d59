"""A file with a supervisor is the file, plus what is added, and --remove takes that out again."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject import command
from plimsoll_cli.inject.command import Selection
from plimsoll_cli.main import app
from plimsoll_operator.injection.options import InjectionOptions

OPTIONS = InjectionOptions(image="registry.example/supervisor:1")
DEPLOYMENT = """\
# of the team
apiVersion: apps/v1
kind: Deployment
metadata:
  name: chat
spec:
  template:
    metadata:
      labels: {app: chat}   # on one line
    spec:
      containers:
        - name: engine
          image: vllm/vllm-openai:v0.24.0   # do not go back
          args: [--model, org/model]
          env:
            - name: FLAG
              value: "n"
"""
SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: chat}\nspec:\n  type: LoadBalancer\t\n"


def injected(file: Path) -> str:
    return command.inject_into_file(file, OPTIONS, Selection())[0]


def there_and_back(file: Path, text: str) -> str:
    file.write_bytes(text.encode())
    made = injected(file)
    file.write_bytes(made.encode())
    assert injected(file) == made
    assert command.remove_from_file(file) == text
    return made


@pytest.mark.parametrize(
    "text",
    [
        DEPLOYMENT,
        SERVICE + "---\n" + DEPLOYMENT + "---\n" + SERVICE,
        "---\n" + DEPLOYMENT.rstrip("\n"),
        DEPLOYMENT.replace("\n", "\r\n"),
        "\ufeff" + DEPLOYMENT,
        DEPLOYMENT.replace("    metadata:\n      labels: {app: chat}   # on one line\n", ""),
        DEPLOYMENT.replace("{app: chat}   # on one line", ""),
        DEPLOYMENT.replace(
            "      containers", "      shareProcessNamespace: false\n      containers"
        ),
        DEPLOYMENT.replace("      containers", "      volumes: []\n      containers"),
        DEPLOYMENT + "  strategy: {}\n",
        DEPLOYMENT + "          # the end\n",
    ],
)
def test_there_and_back(tmp_path: Path, text: str) -> None:
    made = there_and_back(tmp_path / "m.yaml", text)
    assert 'value: "n"' in made
    assert "# do not go back" in made
    if SERVICE in text:
        assert made.startswith(SERVICE)
        assert made.endswith(SERVICE)


def test_a_file_of_json_stays_json(tmp_path: Path) -> None:
    text = (
        '{"kind": "Deployment", "apiVersion": "apps/v1", "metadata": {"name": "w", "labels":'
        ' {"x": "\\ud83d\\ude00"}}, "spec": {"template": {"spec": {"containers": [{"name": "e",'
        ' "image": "vllm/vllm-openai:v1"}]}}}}\n{"kind": "Service", "apiVersion": "v1"}'
    )
    made = there_and_back(tmp_path / "m.json", text)
    assert made.startswith("{")
    assert "---" not in made


def test_a_list_of_objects_stays_one(tmp_path: Path) -> None:
    lines = ["apiVersion: v1", "kind: List", "items:"]
    for name in ("a", "b"):
        lines += ["- " + DEPLOYMENT.replace("chat", name).partition("\n")[2].replace("\n", "\n  ")]
    made = there_and_back(tmp_path / "m.yaml", "\n".join(lines))
    assert made.count("kind: ConfigMap") == 2
    assert made.count("shareProcessNamespace: true") == 2


def test_anchors_that_change_are_written_out_where_they_are_used(tmp_path: Path) -> None:
    text = (
        DEPLOYMENT.replace("env:", "env: &env")
        .replace(
            "spec:\n  template", "spec:\n  selector:\n    matchLabels: &l {app: chat}\n  template"
        )
        .replace("labels: {app: chat}", "labels: *l")
    )
    text += "        - {name: other, image: busybox, env: *env}\n"
    made = there_and_back(tmp_path / "m.yaml", text)
    assert "matchLabels: &l {app: chat}\n" in made
    assert "env: [{name: FLAG, value: 'n'}]" in made


@pytest.mark.parametrize("data", ["{supervisord.conf: x}", "{supervisor.json: x, other: y}"])
def test_a_config_map_of_the_users_own_is_not_replaced(tmp_path: Path, data: str) -> None:
    own = f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: chat-supervisor}}\ndata: {data}\n"
    (tmp_path / "m.yaml").write_text(own + "---\n" + DEPLOYMENT)
    with pytest.raises(UsageError, match="needs the name chat-supervisor, but document"):
        injected(tmp_path / "m.yaml")


def test_two_workloads_of_one_name_have_no_configuration_in_common(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(
        DEPLOYMENT + "---\n" + DEPLOYMENT.replace("Deployment", "StatefulSet")
    )
    _, notes = command.inject_into_file(tmp_path / "m.yaml", OPTIONS, Selection())
    assert "but the supervisor's ConfigMap of Deployment.apps/chat has this name" in notes[-1]


def test_the_command_takes_it_out_or_says_that_nothing_is_there(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(DEPLOYMENT)
    run = CliRunner().invoke
    done = run(app, ["inject", str(file), "--remove"])
    assert "the file contains no record of changes by plimsoll inject" in str(done.exception)
    done = run(app, ["inject", str(file), "--remove", "--supervisor-image", "s"])
    assert "either --remove or --supervisor-image, not both" in str(done.exception)
    done = run(app, ["inject", str(file), "--supervisor-image", "s"])
    file.write_bytes(done.stdout_bytes)
    assert run(app, ["inject", str(file), "--remove"]).stdout_bytes == DEPLOYMENT.encode()
