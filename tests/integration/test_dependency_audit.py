"""No locked version has a known vulnerability."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import audit
import pytest

AUDIT = Path(__file__).parents[2] / "requirements" / "audit.py"
UNREACHABLE = 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_locked_version_is_vulnerable() -> None:
    done = subprocess.run([sys.executable, AUDIT], capture_output=True, text=True)
    if done.returncode == UNREACHABLE and os.environ.get("CI") != "true":
        pytest.skip(done.stderr.splitlines()[0])
    assert done.returncode == 0, done.stderr


def test_what_does_not_affect_us_is_passed_over_and_told_to_users() -> None:
    found = [
        audit.Vulnerability("operator", "aiohttp", "3.1", "CVE-2026-1", ("3.2",)),
        audit.Vulnerability("operator", "kopf", "1.0", "CVE-2026-2", ()),
    ]
    known = {
        "CVE-2026-1": {
            "status": "not_affected", "justification": "vulnerable_code_not_in_execute_path",
            "impact_statement": "No server of aiohttp runs.",
        }
    }  # fmt: skip
    assert audit.affecting(found, known) == found[1:]
    document = audit.openvex({"plimsoll-operator": found}, known, "1.2.3", "2026-11-26T00:00:00Z")
    assert document is not None
    first, second = document["statements"]
    assert first["vulnerability"] == {"name": "CVE-2026-1"}
    assert first["products"] == [
        {
            "@id": "pkg:oci/plimsoll-operator?tag=1.2.3",
            "subcomponents": [{"@id": "pkg:pypi/aiohttp@3.1"}],
        }
    ]
    assert (first["status"], second["status"]) == ("not_affected", "under_investigation")
    assert audit.openvex({"plimsoll-operator": []}, known, "1.2.3", "") is None
    assert all(one["status"] for one in audit.assessed().values())
