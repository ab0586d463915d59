"""The documents say what is: their checks pass, and the checks find what is wrong.

Tests ``docs/check.py``.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from docs import check
from docs.tools import blocks, commands, executed, links, manifests
from plimsoll_cli.cluster.doctor import MIN_KUBERNETES_MINOR

PROJECT = tomllib.loads((blocks.ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", ["links", "commands", "commands that a test runs", "manifests"])
def test_documents_are_right(name: str) -> None:
    assert list(check.CHECKS[name]()) == []


def test_no_service_of_an_example_configures_vllm() -> None:
    """One named vllm sets VLLM_PORT in the pods of its namespace, and vLLM does not start."""
    found = 0
    for file in (blocks.ROOT / "examples").rglob("*.yaml"):
        objects = [one for one in yaml.safe_load_all(file.read_text()) if one and "kind" in one]
        services = {one["metadata"]["name"] for one in objects if one["kind"] == "Service"}
        templates = [one["spec"]["template"] for one in objects if one["kind"] == "Deployment"]
        if "vllm" in services:
            found += len(templates)
            assert all(one["spec"].get("enableServiceLinks") is False for one in templates), file
    assert found == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("plimsoll top --once", None),
        ("kubectl plimsoll explain X -o json", None),
        ("NO_COLOR=1 plimsoll incidents --open | cat", None),
        ("plimsoll fly", "plimsoll has no command fly"),
        ("plimsoll top --fast", "plimsoll top has no flag --fast"),
        ("make demo", None),
        ("make coffee", "make has no target coffee"),
        ("python -m docs.check", None),
        ("python -m docs.absent", "there is no module ['docs.absent']"),
        ("kubectl apply -f examples/absent.yaml", "examples/absent.yaml: there is no such file"),
        ("kubectl get plinf,plinc -A", None),
        ("kubectl get inferenceservices.plimsoll.dev", None),
        (
            "kubectl get inferenceservices,plinc",
            "inferenceservices may be KServe's kind: write plinf, or the name with .plimsoll.dev",
        ),
        ("frobnicate", "frobnicate is not known here"),
    ],
)
def test_commands_are_parsed(line: str, problem: str | None) -> None:
    assert commands.problem_of(line) == problem


def test_all_pages_name_the_version_of_kubernetes_that_doctor_asks_for() -> None:
    least = f"1.{MIN_KUBERNETES_MINOR}"
    chart = yaml.safe_load((blocks.ROOT / "charts" / "plimsoll" / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={least}.0-0"
    found = {
        str(path.relative_to(blocks.ROOT)): set(
            re.findall(r"Kubernetes (1\.\d+) or later", path.read_text())
        )
        for path in blocks.documents()
    }
    wanted = {"README.md", "docs/quickstart.md", "docs/adopt.md"}
    assert wanted <= {name for name in found if found[name]}
    assert all(versions <= {least} for versions in found.values()), found


def test_the_changelog_begins_with_what_a_user_notices_next() -> None:
    newest = (blocks.ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert newest.startswith(f"[{PROJECT['version']}] - ")
    assert re.findall(r"(?m)^### (\w+)", newest) == ["Added", "Changed", "Fixed", "Removed"]
    assert len(newest.splitlines()) < 120, "move details to docs/history.md"


def test_the_version_is_written_in_one_place() -> None:
    """Chart and manifests have it from there, by ``charts/generate.py``."""
    pattern = re.compile(rf"\b{re.escape(PROJECT['version'])}\b")
    others = [
        *blocks.documents(), blocks.ROOT / "Makefile", blocks.ROOT / "Dockerfile",
        *(blocks.ROOT / "charts" / "plimsoll").glob("values*"),
        *(blocks.ROOT / ".github").rglob("*.yml"), *blocks.ROOT.glob("*/pyproject.toml"),
    ]  # fmt: skip
    told = {"CHANGELOG.md", "history.md", "fixes.md", "conformance.md"}
    assert [one for one in others if one.name not in told and pattern.search(one.read_text())] == []


def test_no_upgrade_of_the_chart_loses_the_new_defaults() -> None:
    """``--reuse-values`` alone takes the old chart's defaults for values that the new one added."""
    for path in (*blocks.documents(), *sorted((blocks.ROOT / "charts").rglob("NOTES.txt"))):
        text = path.read_text()
        assert not re.search(r"(?<!then)-reuse-values", text), path
        for command in re.findall(r"helm upgrade (?!again)[^`]*", text):
            assert re.search(r"--reset-then-reuse-values|--install", command), f"{path}: {command}"


PROGRAMS = ("cli", "operator", "sidecar", "crds", "charts", "dashboards")


def test_no_command_in_a_text_of_the_programs_may_mean_the_kind_of_kserve() -> None:
    """Chart notes, alerts, descriptions of fields, help and messages."""
    files = [
        path
        for folder in PROGRAMS
        for path in (blocks.ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".txt", ".tpl", ".md", ".json")
    ]
    assert len(files) > 300
    wrong = [
        f"{path.relative_to(blocks.ROOT)}: {command}"
        for path in files
        for command in re.findall(r"kubectl [a-z]+ [^\n`\"']*", path.read_text())
        if commands.AMBIGUOUS.search(command)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("kubectl plimsoll top --once", "top"),
        ("kubectl -n plimsoll-system rollout restart deploy/x", "rollout"),
        ("NO_COLOR=1 plimsoll explain X", "explain"),
        ("python -m docs.check", "docs.check"),
        ("make demo", "demo"),
        (". .venv/bin/activate", None),
        ("plimsoll --install-completion", None),
    ],
)
def test_what_a_command_does(line: str, what: str | None) -> None:
    assert executed.deed(line) == what


def test_a_command_that_nobody_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`plimsoll levitate POD`\n```sh\nkubectl get pods\n```\n"
        "<!-- run: tests/absent.py -->\n```sh\nkubectl get pods\n```\n"
        "<!-- run: test_some.py -->\n```sh\nkubectl get pods\nkubectl frown\n```\n"
    )
    (tmp_path / "test_some.py").write_text('kube("get")\n')
    for module in (executed, blocks):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    assert [one.split(": ", 1)[1] for one in executed.unrun(page)] == [
        "no test runs it: mark who does, as docs/tools/executed.py says",
        "tests/absent.py: there is no such test",
        "kubectl frown: test_some.py does not run 'frown'",
        "`plimsoll levitate POD`: no test runs 'levitate'",
    ]


def test_a_broken_link_and_a_bad_manifest_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n[a](absent.md) [b](#a-page) [c](#absent) [d](https://example.com)\n"
        "```yaml\napiVersion: plimsoll.dev/v1alpha1\nkind: InferenceService\n"
        "metadata: {name: x}\nspec: {model: {uri: 'ftp://x'}}\n```\n"
        "<!-- run -->\n```sh\ntrue\n```\n"
    )
    for module in (links, manifests, blocks):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    assert [one.split(": ", 1)[1] for one in links.broken(page)] == [
        "absent.md: there is no such file",
        "#absent: there is no such heading",
    ]
    (problem,) = manifests.wrong(page)
    assert problem.startswith("page.md:4: spec.model.uri")
    (block,) = blocks.blocks(page, "sh")
    assert (block.run, block.line) == ("local", 11)
