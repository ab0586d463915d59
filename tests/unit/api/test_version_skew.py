"""Parts of different versions: what a later one says is read, and what an earlier one leaves out.

Tests ``plimsoll_api/open_enum.py`` and the structs of every contract.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import msgspec.inspect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api import admin, supervisor_config
from plimsoll_api.action_answer import ActionAnswer
from plimsoll_api.admin import Capability, EngineState, MemoryKind, Role, Status
from plimsoll_api.assessment import Assessment, Segment
from plimsoll_api.decoding import MalformedError
from plimsoll_api.leakincident import LeakIncidentSpec, LeakIncidentStatus
from plimsoll_api.open_enum import OpenEnum, iterate_unknown_values
from plimsoll_api.state import View
from plimsoll_api.supervision import Action, Mode
from plimsoll_api.supervisor_config import PodEngine, SupervisorConfig
from plimsoll_cli.explain import choose_next_step
from plimsoll_cli.incident_view import make_view_from_object
from plimsoll_sidecar.govern.incident import Incident
from plimsoll_sidecar.record.storage import DamagedRowError, decode_row

FUTURE = st.from_regex(r"future_[a-z]{1,12}", fullmatch=True)
REQUIRED = {
    "Assessment": "epoch t warm",
    "AuditFinding": "detail rule",
    "Audit": "epoch findings idle rules",
    "DeviceMemory": "index",
    "DrainRequest": "expected_epoch operation_id",
    "EngineEndpoint": "admin_url serving_url type",
    "ErrorBody": "code message",
    "GroupMember": "index",
    "IncidentCondition": "lastTransitionTime reason status type",
    "IncidentRecord": "epoch kind name opened_at",
    "IncidentStep": "outcome step time",
    "IncidentTarget": "role",
    "IncidentTrigger": "bytesEach confidencePercent counter",
    "IncidentWorkload": "kind name",
    "LeakIncidentSpec": "container epoch id kind openedAt pod workloadRef",
    "LedgerEntry": "bytes kind owner",
    "MainProcess": "pid started",
    "MaintenanceWindow": "start_s",
    "MemoryBudget": "growth_bytes",
    "Operation": "epoch_before id kind started_at state",
    "OperationStep": "duration_s name",
    "PodEngine": "engine",
    "PolicyReference": "name",
    "ProcessMemory": "pid role",
    "Recycle": "max_age_s",
    "RestartRequest": "expected_epoch operation_id",
    "ResumeRequest": "expected_epoch",
    "ServiceRef": "name",
    "ShutdownRequest": "expected_epoch operation_id",
    "StandbyRequest": "expected_epoch lease_s",
    "StandbyStatus": "state",
    "Status": "epoch load model state uptime_s version",
    "StepRecord": "outcome step time",
    "SupervisorConfig": "engine service",
    "Suspicion": "confidence consumed_ratio kind segment",
    "Trigger": "bytes_each confidence counter",
    "TrimRequest": "expected_epoch operation_id",
    "View": "assessment budgets config_error engine_state epoch journal_error mode open recent "
    "restart_budget_exhausted restarts_left service time",
    "WorkloadRef": "kind name",
}
"""Fields that every version has written. A later one needs a default: earlier parts leave it out,
and a new required field here would make them unreadable."""
CONTRACTS = (
    Status, admin.Operation, admin.ErrorBody, admin.Audit, admin.TrimRequest, admin.DrainRequest,
    admin.ResumeRequest, admin.RestartRequest, admin.ShutdownRequest, admin.StandbyRequest,
    View, ActionAnswer, LeakIncidentSpec, LeakIncidentStatus, SupervisorConfig, PodEngine,
)  # fmt: skip


def known_status() -> dict[str, Any]:
    return {
        "state": "serving", "epoch": "aa:1", "version": "1", "model": "m", "uptime_s": 1.0,
        "load": {"running": 2, "steps_total": 7},
        "processes": [{"role": "worker", "pid": 7, "malloc_in_use": 9}],
        "devices": [{"index": 0, "used": 5, "total": 9}],
        "ledger": [{"owner": "kv_pool", "kind": "device", "bytes": 5, "bound": 5}],
        "capabilities": ["trim", "drain"], "standby": {"state": "prepared"},
    }  # fmt: skip


@st.composite
def futures(draw: st.DrawFn) -> dict[str, Any]:
    """A status as a later engine may answer: with more of everything, and in another order."""
    status = known_status()
    objects = [status, status["load"], status["standby"]]
    objects += [*status["processes"], *status["devices"], *status["ledger"]]
    for one in objects:
        values = st.none() | st.integers() | FUTURE | st.lists(st.booleans(), max_size=2)
        one.update(draw(st.dictionaries(FUTURE, values, max_size=3)))
    words = st.lists(FUTURE, max_size=3)
    status["capabilities"] = draw(st.permutations(status["capabilities"] + draw(words)))
    for role in draw(words):
        status["processes"].append({"role": role, "pid": 8})
    for owner in draw(words):
        kind = draw(st.sampled_from(["host", "device"]) | FUTURE)
        status["ledger"].append({"owner": owner, "kind": kind, "bytes": 1})
    if draw(st.booleans()):
        status["state"], status["standby"]["state"] = draw(FUTURE), draw(FUTURE)
    return status


@given(status=futures())
def test_the_status_of_a_later_engine_is_read(status: dict[str, Any]) -> None:
    read = msgspec.json.decode(json.dumps(status), type=Status)
    known = msgspec.json.decode(json.dumps(known_status()), type=Status)

    assert set(read.capabilities) & set(Capability) == {Capability.TRIM, Capability.DRAIN}
    assert (read.load, read.devices, read.epoch) == (known.load, known.devices, known.epoch)
    assert [one for one in read.processes if one.role.is_known] == known.processes
    assert [one for one in read.ledger if one.owner == "kv_pool"] == known.ledger
    assert len(read.ledger) == len(status["ledger"])
    assert read.state.is_known == (status["state"] == "serving")
    assert str(read.state) == status["state"]
    later = [word.value for word in iterate_unknown_values(read)]
    assert all(word.startswith("future_") for word in later)
    assert json.loads(msgspec.json.encode(read))["capabilities"] == status["capabilities"]


@pytest.mark.parametrize("word", ["", "two words", "<b>", "1st", "x" * 64, "naïve", 7, None])
def test_what_is_no_plain_word_is_refused(word: object) -> None:
    """An answer may contain anything: a word that is kept and shown is short and harmless."""
    status = known_status() | {"state": word}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(status), type=Status)


def test_an_unknown_word_is_none_of_the_known_ones() -> None:
    word = EngineState("hibernating")
    assert not word.is_known
    assert str(word) == "hibernating"
    assert word == EngineState("hibernating")
    assert word not in list(EngineState)
    assert all(word != one for one in EngineState)
    assert all(one.is_known for one in EngineState)


def test_the_page_of_a_later_supervisor_is_read() -> None:
    incident = {
        "name": "a-1", "kind": "FileGrowth", "epoch": "a:1", "opened_at": 1.0, "phase": "Cooling",
        "reason": "Migrated", "waits": "PowerBudget", "rung": "Migrate", "later": [1],
        "timeline": [{"time": 1.0, "step": "Migrate", "outcome": "Delegated", "later": {}}],
    }  # fmt: skip
    page = {
        "time": 1.0, "service": "a", "mode": "Predict", "engine_state": "hibernating", "epoch": "a",
        "assessment": {
            "t": 1.0, "epoch": 1, "warm": True, "segments": {"mapped_files": 1, "shared": 2},
            "suspicions": [
                {"kind": "FileGrowth", "segment": "mapped_files", "confidence": 1.0,
                 "consumed_ratio": 1.0}
            ],
        },
        "budgets": {"disk": {}}, "open": [incident], "recent": [], "restarts_left": 1,
        "restart_budget_exhausted": False, "journal_error": None, "config_error": None,
        "ladder": ["Trim", "Migrate"], "later": True,
    }  # fmt: skip
    view = msgspec.json.decode(json.dumps(page), type=View)
    assert view.assessment.segments[Segment.SHARED] == 2
    assert view.ladder[0] is Action.TRIM
    assert view.open[0].phase == "Cooling"
    assert not view.open[0].ended
    assert not view.open[0].timeline[0].outcome.is_known
    words = {"FileGrowth", "Cooling", "Migrated", "PowerBudget", "Migrate", "Delegated"}
    assert {word.value for word in iterate_unknown_values(view)} == words | {"mapped_files"}


def test_the_object_of_a_later_supervisor_is_shown_with_its_own_words() -> None:
    spec = {
        "id": "i", "workloadRef": {"kind": "Deployment", "name": "a"}, "pod": "a-0",
        "container": "engine", "epoch": "a:1", "openedAt": "2026-01-01T00:00:00Z",
        "kind": "FileGrowth", "later": 1,
    }  # fmt: skip
    status = {"phase": "Cooling", "outcome": "Migrated", "waitingReason": "PowerBudget"}
    view = make_view_from_object({"metadata": {"name": "i"}, "spec": spec, "status": status})
    assert (view.spec.kind, view.story.phase, view.story.has_ended) == (
        "FileGrowth",
        "Cooling",
        False,
    )
    assert choose_next_step(view)


def test_a_journal_of_a_later_supervisor_is_not_acted_on() -> None:
    """A governor has no move for a phase that it does not know: the row is set aside."""
    for change in ({"phase": "Cooling"}, {"kind": "FileGrowth"}, {"tried": ["Migrate"]}):
        row = {"name": "a-1", "kind": "Stall", "epoch": "a:1", "opened_at": 1.0} | change
        body = json.dumps(row).encode()
        with pytest.raises(DamagedRowError, match="later version"):
            decode_row(body, zlib.crc32(body), Incident)


def test_an_action_of_a_later_operator_is_left_out_and_a_mode_is_refused() -> None:
    """What it may not do less carefully than it was asked to, it does not guess."""
    config = {
        "service": {"name": "a"},
        "engine": {"type": "vllm", "admin_url": "", "serving_url": "http://127.0.0.1:8000"},
        "supervision": {"ladder": ["Trim", "Migrate"], "later": 1},
        "later": {},
    }
    found = supervisor_config.decode_config(json.dumps(config).encode())
    assert found.supervision.mode is Mode.OBSERVE
    assert found.supervision.ladder == (Action.TRIM, "Migrate")
    config["supervision"] = {"mode": "Predict"}
    with pytest.raises(MalformedError, match=r"supervision\.mode"):
        supervisor_config.decode_config(json.dumps(config).encode())


@pytest.mark.parametrize("kind", [kind for kind in CONTRACTS if kind.__name__.endswith("Request")])
def test_a_request_names_only_what_was_chosen(kind: type[msgspec.Struct]) -> None:
    """So that an earlier engine, which refuses a field that it does not know, takes the rest."""
    chosen = {"operation_id": "op-1", "expected_epoch": "a:1", "lease_s": 5.0}
    values = {name: chosen[name] for name in REQUIRED[kind.__name__].split()}
    assert json.loads(msgspec.json.encode(kind(**values))) == values
    refused = json.dumps(values | {"later": 1})
    with pytest.raises(msgspec.ValidationError, match="later"):
        msgspec.json.decode(refused, type=kind)


def structs(kind: object, seen: set[type]) -> Iterator[msgspec.inspect.StructType]:
    """``kind`` and all structs that it holds."""
    if isinstance(kind, msgspec.inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        yield kind
        for one in kind.fields:
            yield from structs(one.type, seen)
    elif isinstance(kind, msgspec.inspect.Type):
        for name in cast("msgspec.Struct", kind).__struct_fields__:
            inner = getattr(kind, name)
            for one in inner if isinstance(inner, tuple) else (inner,):
                yield from structs(one, seen)


def test_what_an_earlier_version_leaves_out_has_a_default() -> None:
    seen: set[type] = set()
    found = {
        struct.cls.__name__: sorted(one.encode_name for one in struct.fields if one.required)
        for kind in CONTRACTS
        for struct in structs(msgspec.inspect.type_info(kind), seen)
    }
    assert {name: " ".join(fields) for name, fields in found.items() if fields} == REQUIRED


@pytest.mark.parametrize("kind", OpenEnum.__subclasses__())
def test_an_earlier_version_could_read_every_word_of_ours(kind: type[OpenEnum]) -> None:
    for one in kind:
        assert kind(one.value) is one
        other = Role if kind is not Role else MemoryKind
        assert other(one.value) == one.value


def test_an_assessment_keeps_what_is_known() -> None:
    text = b'{"t":1,"epoch":1,"warm":true,"host":{"current":5,"later":1},"later":[]}'
    read = msgspec.json.decode(text, type=Assessment)
    assert read.host is not None
    assert read.host.current == 5
