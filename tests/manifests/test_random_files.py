"""Random files and pods: nothing is lost, nothing is changed, and nothing raises an exception."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll_api.supervision import Mode, Supervision
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_cli.errors import UsageError
from plimsoll_cli.inject import command
from plimsoll_cli.inject.command import Selection
from plimsoll_cli.yaml_tree import split_documents
from plimsoll_operator.injection.options import InjectionOptions
from plimsoll_operator.injection.policy import inject_pod
from plimsoll_operator.render.containers import Images
from tests.manifests import documents

OPTIONS = (
    InjectionOptions("s:1", group_restarts=True),
    InjectionOptions("s:1", probe=True, group_restarts=True, run_as_user=1000),
    InjectionOptions("s:1", unrecognized=True, supervision=Supervision(mode=Mode.RECOVER)),
)
# PLIMSOLL_RANDOM_FILES=5000 tries as many.
MANY = int(os.environ.get("PLIMSOLL_RANDOM_FILES", "100"))
QUICK = settings(
    max_examples=MANY, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
RANDOM = st.integers(0, 1 << 32).map(Random)


def there_and_back(file: Path, text: str, options: InjectionOptions) -> bool:
    """Whether something was injected; that it can be taken out again is checked."""
    file.write_bytes(text.encode())
    try:
        made, _ = command.inject_into_file(file, options, Selection())
    except UsageError:
        return False
    file.write_bytes(made.encode())
    assert command.inject_into_file(file, options, Selection())[0] == made
    assert command.remove_from_file(file) == text
    before, after = ([one.text for one in split_documents(each)] for each in (text, made))
    assert len(after) > len(before)
    return True


@QUICK
@given(random=RANDOM)
def test_a_random_file_comes_back_to_the_byte(tmp_path: Path, random: Random) -> None:
    text = documents.file(random)
    there_and_back(tmp_path / "m.yaml", text, random.choice(OPTIONS))


@QUICK
@given(random=RANDOM)
def test_no_file_raises_an_exception(tmp_path: Path, random: Random) -> None:
    text = documents.file(random, spoil=True)
    there_and_back(tmp_path / "m.yaml", text, random.choice(OPTIONS))


POLICY: dict[str, Any] = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "SupervisionPolicy",
    "metadata": {"name": "p"},
    "spec": {"selector": {"matchLabels": {"app": "x"}}},
}
IMAGES = Images("engine:1", "supervisor:1")


@QUICK
@given(random=RANDOM)
def test_no_pod_raises_an_exception_in_the_webhook(random: Random) -> None:
    spec = documents.pod(random)
    if random.random() < 0.5:
        spoilt = documents.spoilt(random, spec)
        spec = spoilt if isinstance(spoilt, dict) else spec
    wanted = {**POLICY, "spec": {**POLICY["spec"], "probe": {"enabled": random.random() < 0.3}}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    made = inject_pod(pod, SupervisionPolicy.model_validate(wanted), IMAGES)
    listed = made.pod["spec"].get("initContainers")
    added = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    assert made.refusal or any(one.get("name") == "supervisor" for one in added)
