"""Panels with a unit, a description, and colors that mean one thing everywhere."""

from __future__ import annotations

from typing import TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat
from grafana_foundation_sdk.builders import timeseries as graph
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="$datasource")
HEIGHT = 8
FULL, WIDE, HALF, THIRD = 24, 16, 12, 8
BYTES, SECONDS, SHARE, COUNT, RATE = "bytes", "s", "percentunit", "short", "ops"
TAG = "plimsoll"
LEVELS = {"baseline": "green", "budget": "red"}

P = TypeVar("P", graph.Panel, bargauge.Panel, stat.Panel)
Query = tuple[str, str]
"""An expression and the legend of its series."""


def lines(
    title: str, unit: str, text: str, *queries: Query, width: int = HALF, stacked: bool = False
) -> graph.Panel:
    """Return a panel of series over time; ``stacked`` draws them on top of one another."""
    panel = _dressed(graph.Panel(), title, unit, text, width, queries)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
    panel.legend(legend.placement(LegendPlacement.BOTTOM).show_legend(True))
    panel.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    panel.fill_opacity(25 if stacked else 5).line_width(1)
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for name in (name for _, name in queries if name in LEVELS):
        panel.override_by_name(name, _level(LEVELS[name]))
    return panel


def _level(colour: str) -> list[DynamicConfigValue]:
    """Budget and baseline are levels to compare with, not parts of the stack."""
    apart = common.StackingConfig().mode(StackingMode.NONE).build()
    return [
        _value("custom.stacking", apart),
        _value("custom.fillOpacity", 0),
        _value("custom.lineWidth", 2),
        _value("custom.lineStyle", {"fill": "dash", "dash": [10, 6]}),
        _value("color", {"mode": "fixed", "fixedColor": colour}),
    ]


def bars(title: str, unit: str, text: str, *queries: Query, width: int = HALF) -> bargauge.Panel:
    """Return a bar for the newest value of each series, which is a share."""
    panel = _dressed(bargauge.Panel(), title, unit, text, width, queries, instant=True)
    panel.display_mode(BarGaugeDisplayMode.BASIC).orientation(VizOrientation.HORIZONTAL)
    return panel.min(0).max(1).thresholds(_traffic_light())


def number(title: str, unit: str, text: str, query: str, width: int = 4) -> stat.Panel:
    """Return a panel with one value."""
    panel = _dressed(stat.Panel(), title, unit, text, width, [(query, "")], instant=True)
    panel.graph_mode(BigValueGraphMode.NONE).color_mode(BigValueColorMode.NONE)
    return panel.height(4)


def board(uid: str, title: str, text: str, *variables: str) -> dashboard.Dashboard:
    """Return a dashboard without panels; its queries select by the labels ``variables``."""
    made = (
        dashboard.Dashboard(f"Plimsoll / {title}")
        .uid(f"plimsoll-{uid}")
        .description(text)
        .tags([TAG])
        .readonly()
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .link(
            dashboard.DashboardLink("Plimsoll")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    chosen = ""
    for label in variables:
        metric = f"plimsoll_supervisor_samples_total{{{chosen}}}"
        made.with_variable(
            dashboard.QueryVariable(label)
            .label(label.capitalize())
            .datasource(SOURCE)
            .query(f"label_values({metric}, {label})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .include_all(True)
            .all_value(".*")
            .multi(True)
        )
        chosen = f'{chosen},{label}=~"${label}"'.lstrip(",")
    return made


def _dressed(
    panel: P,
    title: str,
    unit: str,
    text: str,
    width: int,
    queries: tuple[Query, ...] | list[Query],
    instant: bool = False,
) -> P:
    panel.title(title).description(text).unit(unit).datasource(SOURCE)
    panel.span(width).height(HEIGHT)
    for index, (expression, legend) in enumerate(queries):
        query = prometheus.Dataquery().expr(expression).ref_id(chr(ord("A") + index))
        if legend:
            query.legend_format(legend)
        panel.with_target(query.instant() if instant else query.range())
    return panel


def _traffic_light() -> dashboard.ThresholdsConfig:
    steps = [(None, "green"), (0.5, "yellow"), (1.0, "red")]
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=colour) for value, colour in steps])
    )


def _value(name: str, value: object) -> DynamicConfigValue:
    return DynamicConfigValue(id_val=name, value=value)
