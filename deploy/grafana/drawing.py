"""Page -> the JSON that Grafana reads."""

from __future__ import annotations

import json

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.chart import PREFIX, Chart, Page, Shape, Variable
from deploy.grafana.queries import of_installation

#: chosen by the reader: a Grafana may have several Prometheus
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${source}")
_SOURCES = DatasourceVariable("source").label("Data source").type("prometheus")
_INSTALLATIONS = (
    QueryVariable("installation")
    .label("Installation")
    .datasource(SOURCE)
    .query("label_values(millstream_gateway_ready, installation)")
    .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    .sort(models.VariableSort.ALPHABETICAL_ASC)
)
#: histograms whose buckets have the trace ids of exported traces

Panel = stat.Panel | timeseries.Panel | heatmap.Panel


def draw(page: Page) -> str:
    """Return the dashboard as JSON text."""
    board = (
        Dashboard(page.title)
        .uid(page.uid)
        .description(page.about)
        .tags([PREFIX])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .link(
            DashboardLink("Millstream")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([PREFIX])
            .include_vars(True)
            .keep_time(True)
        )
    )
    board.with_variable(_SOURCES).with_variable(_INSTALLATIONS)
    for variable in page.variables:
        board.with_variable(_variable(variable))
    number = 1
    for title, charts in page.rows:
        board.with_row(Row(title).id(number))
        for chart in charts:
            number += 1
            board.with_panel(_DRAWN[chart.shape](chart, number))
        number += 1
    # Through the parser once: the builders' order of keys is theirs to change, ours is sorted.
    return json.dumps(json.loads(JSONEncoder().encode(board.build())), indent=2, sort_keys=True) + "\n"


def _variable(variable: Variable) -> QueryVariable:
    return (
        QueryVariable(variable.label)
        .label(variable.label.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({of_installation(variable.metric)}, {variable.label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _targets(chart: Chart) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .datasource(SOURCE)
        .ref_id(chr(ord("A") + index))
        .expr(of_installation(expr))
        .legend_format(legend)
        for index, (expr, legend) in enumerate(chart.queries)
    ]


def _described(panel: Panel, chart: Chart, number: int) -> Panel:
    return panel.id(number).title(chart.title).description(chart.about).unit(chart.unit).datasource(SOURCE)


def _number(chart: Chart, number: int) -> Builder[models.Panel]:
    latest = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = stat.Panel().span(4).height(4).graph_mode(BigValueGraphMode.AREA).reduce_options(latest)
    return _described(panel.targets([*_targets(chart)]), chart, number)


def _lines(chart: Chart, number: int) -> Builder[models.Panel]:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    panel = timeseries.Panel().span(8).height(8).min(0).fill_opacity(10).legend(legend)
    return _described(panel.targets([*_targets(chart)]), chart, number)


def _heatmap(chart: Chart, number: int) -> Builder[models.Panel]:
    targets = [target.format(PromQueryFormat.HEATMAP) for target in _targets(chart)]
    panel = heatmap.Panel().span(8).height(8).calculate(False).targets([*targets])
    panel.y_axis(heatmap.YAxisConfig().unit(chart.unit))
    return _described(panel, chart, number)


_DRAWN = {Shape.NUMBER: _number, Shape.LINES: _lines, Shape.HEATMAP: _heatmap}
