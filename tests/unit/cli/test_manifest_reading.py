"""Reading a manifest: what is wrong is named with file, place and field, on one line each.

Tests ``plimsoll_cli/manifest.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll_cli import manifest
from plimsoll_cli.errors import UsageError

GOOD = """\
apiVersion: plimsoll.dev/v1alpha1
kind: InferenceService
metadata:
  name: tiny
spec:
  model:
    uri: file:///models/tiny
  memory:
    host:
      growthBudget: 256Mi
"""


def message_for(tmp_path: Path, text: str | bytes) -> str:
    file = tmp_path / "service.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        manifest.read_service(file)
    message = str(caught.value)
    assert all(line.startswith(str(file)) for line in message.splitlines())
    return message.replace(str(file), "FILE")


def test_a_manifest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(f"---\n{GOOD}---\n")

    service = manifest.read_service(file)

    assert service.metadata.name == "tiny"
    assert service.spec.memory.host is not None
    assert service.spec.memory.host.growth_bytes == 256 << 20


@pytest.mark.parametrize("name", ["tiny", "leaky"])
def test_the_examples_are_good(name: str) -> None:
    examples = Path(__file__).parents[3] / "examples"

    assert manifest.read_service(examples / f"{name}.yaml").metadata.name == name


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "growthBudget: 256Mi",
            "growthBudget: 0",
            "spec.memory.host.growthBudget: must be at least 1Mi, not '0'",
        ),
        (
            "growthBudget: 256Mi",
            "growthBudget: 2Gi\n      limit: 1Gi",
            "spec.memory.host: growthBudget (2.0 GiB) must not be larger than limit (1.0 GiB)",
        ),
        ("growthBudget: 256Mi", "growthBudget: lots", "'lots' is not a valid quantity"),
        ("growthBudget: 256Mi", "growthBudget: auto", "'auto' is not a valid budget: write Auto"),
        ("  memory:", "  memmory: {}\n  memory:", "spec.memmory: is not a known field: remove"),
        ("    uri: file:///models/tiny", "    {}", "spec.model.uri: is required: add it"),
        ("name: tiny", "name: Tiny_1", "metadata.name: 'Tiny_1' must be"),
        ("kind: InferenceService", "kind: Deployment", "kind: 'Deployment' is not supported"),
        ("v1alpha1", "v1", "apiVersion: 'plimsoll.dev/v1' is not supported: use"),
        ("kind: InferenceService\n", "", "kind: None is not supported by this command"),
        ("  model:", "  model: {}\n  model:", "contains the key model twice: remove one"),
        ("spec:", "spec: [", ":6:8: the document is not valid YAML"),
        ("file:///models", "file:///a/../b", "model.uri must be"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert old in GOOD

    message = message_for(tmp_path, GOOD.replace(old, new, 1))

    if "not valid YAML" in expected:
        assert "not valid YAML" in message
        assert message.startswith("FILE:")
    else:
        assert expected in message


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("maxUnavailable: 25%", "must be an integer, but the value is '25%'"),
        ("maxUnavailable: 0", "must be an integer of at least 1, but the value is 0"),
        ("sweepSharedMemory: 1", "must be true or false, but the value is 1"),
        ("ladder: Trim", "must contain only Trim, WorkerRestart, EngineRestart, PodReplace"),
    ],
)
def test_a_message_names_types_as_people_do(tmp_path: Path, field: str, expected: str) -> None:
    message = message_for(tmp_path, f"{GOOD}  supervision:\n    {field}\n")

    name = field.partition(":")[0]
    assert message.startswith(f"FILE: spec.supervision.{name}: {expected}")


def test_a_message_quotes_a_value_once(tmp_path: Path) -> None:
    message = message_for(tmp_path, GOOD.replace("name: tiny", "name: Tiny_1"))

    assert message.count("'Tiny_1'") == 1


def test_each_problem_has_a_line_of_its_own(tmp_path: Path) -> None:
    text = GOOD.replace("256Mi", "0").replace("uri:", "url:")

    lines = message_for(tmp_path, text).splitlines()

    assert len(lines) == 3  # uri is missing, url is unknown, the budget is 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "contains no document"),
        (GOOD + "---\n" + GOOD, "contains 2 documents"),
        ("- a\n- b\n", "contains no object"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ("a: &a [*a]\nb: !!python/object/apply:os.system [id]\n", "the value that contains it"),
        ("a: b: c", "not valid YAML"),
        ("[" * 5000, "not valid YAML|nested in more than"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(
    tmp_path: Path, content: str | bytes, expected: str
) -> None:
    message = message_for(tmp_path, content)

    assert any(text in message for text in expected.split("|")), message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml: cannot read the file: No such file"):
        manifest.read_service(tmp_path / "absent.yaml")
    with pytest.raises(UsageError, match="Is a directory"):
        manifest.read_service(tmp_path)
