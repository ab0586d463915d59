"""The numbers that decide are few, in order, and each says what it means.

Tests ``detect/thresholds.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest

from plimsoll_sidecar.detect import thresholds
from plimsoll_sidecar.detect.thresholds import THRESHOLDS, Thresholds


def test_there_are_at_most_fifteen_and_each_has_a_meaning() -> None:
    tree = ast.parse(Path(thresholds.__file__).read_text())
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    fields = [field.name for field in dataclasses.fields(Thresholds)]
    assert len(fields) <= 15
    told = {
        node.target.id: len(after.value.value)
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }
    assert list(told) == fields
    assert min(told.values()) > 30


def test_the_less_a_growth_says_the_more_of_the_budget_it_takes() -> None:
    at = THRESHOLDS
    assert 0 < at.early_share < at.suspect_share < 1
    assert at.soon_s < at.slow_s


def test_nobody_changes_them_while_the_supervisor_runs() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        THRESHOLDS.tau = 0.5  # type: ignore[misc]
