"""Annotations over the panels of a dashboard: when a remediation ended."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import AnnotationQuery
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard

from dashboards.panels import SOURCE


class _Marks(Builder[dashboard.AnnotationQuery]):
    """What the SDK's builder makes, with the fields that Prometheus' annotations read."""

    def __init__(self, name: str, expression: str, title: str, colour: str) -> None:
        self._query = (
            AnnotationQuery()
            .name(name)
            .datasource(SOURCE)
            .enable(True)
            .icon_color(colour)
            .expr(expression)
            .build()
        )
        self._title = title

    def build(self) -> dashboard.AnnotationQuery:
        inner, title = self._query.to_json, self._title
        self._query.to_json = lambda: inner() | {"titleFormat": title, "step": "15s"}  # type: ignore[method-assign]
        return self._query


def remediations(at: str) -> Builder[dashboard.AnnotationQuery]:
    """Return an annotation at each remediation that ended within the last minute."""
    changed = f"changes(plimsoll_remediations_total{{{at}}}[1m]) > 0"
    return _Marks("Remediations", changed, "{{action}} {{outcome}} {{pod}}", "purple")
