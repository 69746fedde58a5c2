"""Build the Grafana dashboard: `python deploy/grafana/build.py [FILE]`, by default over the one that is committed.

The expressions stand here, once; tests run every one of them against a live Prometheus.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable, Row
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import BigValueGraphMode, LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

COMMITTED = Path(__file__).parent / "dashboards" / "millstream.json"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="millstream-prometheus")

_OF_MODEL = 'model=~"$model"'
_FAILED = 'outcome=~"overloaded|unavailable|expired|memory|model|storage|internal"'


@dataclass(frozen=True)
class Chart:
    """One panel: what it shows, in which unit, and the queries with the names of their lines."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def rate(metric: str, by: str = "", where: str = "") -> str:
    """The per-second rate of a counter, summed by labels."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric}{f'{{{where}}}' if where else ''}[$__rate_interval]))"


def quantile(part: float, metric: str, by: str = "model") -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({part}, {rate(f'{metric}_bucket', f'{by}, le', _OF_MODEL)})"


ALL_REQUESTS = rate("millstream_requests_total", where=_OF_MODEL)
FAILED_REQUESTS = rate("millstream_requests_total", where=f"{_OF_MODEL}, {_FAILED}")
BATCH_ROWS = rate("millstream_batch_rows_sum", "model, pool", _OF_MODEL)
BATCHES_RUN = rate("millstream_batch_rows_count", "model, pool", _OF_MODEL)
INSTANCE_BYTES = f"max by (model, version, pool, worker) (millstream_instance_memory_bytes{{{_OF_MODEL}}})"
INSTANCES_READY = f"max by (model, version, pool) (millstream_instances_ready{{{_OF_MODEL}}})"
LOAD_SECONDS = rate("millstream_model_load_duration_seconds_sum", "model, pool", _OF_MODEL)
COLD_REQUESTS = rate("millstream_cold_requests_total", "model, pool", _OF_MODEL)
LOAD_WAIT_SECONDS = rate("millstream_load_wait_seconds_sum", "model, pool", _OF_MODEL)
LOAD_WAITS = rate("millstream_load_wait_seconds_count", "model, pool", _OF_MODEL)
LOADS = rate("millstream_model_load_duration_seconds_count", "model, pool", _OF_MODEL)
CACHE_HITS = rate("millstream_model_cache_hits_total", "model", _OF_MODEL)
CACHE_MISSES = rate("millstream_model_cache_misses_total", "model", _OF_MODEL)
EVICTIONS = rate("millstream_evictions_total", "model, pool", _OF_MODEL)
EVICTION_AGE = rate("millstream_eviction_age_seconds_bucket", "model, pool, le", _OF_MODEL)
UNLOAD_SECONDS = rate("millstream_model_unload_duration_seconds_sum", "model, pool", _OF_MODEL)
UNLOADS = rate("millstream_model_unload_duration_seconds_count", "model, pool", _OF_MODEL)
BY_PROCESS, OF_PROCESS = "instance, process", "{{instance}} {{process}}"  # machines have processes of the same name
PROCESS = f"sum by ({BY_PROCESS}) (millstream_process_{{}})"
STREAM_ENTRIES = f"max by (model, version, pool) (millstream_stream_entries{{{_OF_MODEL}}})"

STATS = (
    Chart("Requests", "Answered in a second.", "reqps", ((ALL_REQUESTS, ""),)),
    Chart(
        "Failing",
        "Requests that failed for the server's own reasons, of all.",
        "percentunit",
        ((f"({FAILED_REQUESTS} or vector(0)) / {ALL_REQUESTS}", ""),),
    ),
    Chart(
        "99th percentile",
        "End to end.",
        "s",
        ((f"histogram_quantile(0.99, {rate('millstream_request_duration_seconds_bucket', 'le', _OF_MODEL)})", ""),),
    ),
    Chart("In flight", "Admitted and not yet answered.", "short", (("sum(millstream_requests_in_flight)", ""),)),
    Chart(
        "Instances ready",
        "Loaded, warm and able to serve.",
        "short",
        ((f"sum({INSTANCES_READY})", ""),),
    ),
    Chart("Workers", "Running now.", "short", (("count(max by (worker, pool) (millstream_worker_info))", ""),)),
)

REQUESTS = (
    Chart(
        "Requests by model",
        "Answered in a second, whatever the answer.",
        "reqps",
        ((rate("millstream_requests_total", "model", _OF_MODEL), "{{model}}"),),
    ),
    Chart(
        "Requests by outcome",
        "ok, or the code of the error.",
        "reqps",
        ((rate("millstream_requests_total", "outcome", _OF_MODEL), "{{outcome}}"),),
    ),
    Chart(
        "Requests by protocol",
        "Answered in a second.",
        "reqps",
        ((rate("millstream_requests_total", "protocol", _OF_MODEL), "{{protocol}}"),),
    ),
    Chart(
        "Refused",
        "Turned away before they were queued, by reason; and taken by another pool, by the pool that could not answer.",
        "reqps",
        (
            (rate("millstream_requests_refused_total", "reason"), "{{reason}}"),
            (rate("millstream_requests_overflowed_total", "pool", _OF_MODEL), "overflow from {{pool}}"),
        ),
    ),
    Chart(
        "Time to answer",
        "From a request's last byte to its reply.",
        "s",
        tuple(
            (quantile(part, "millstream_request_duration_seconds"), f"{{{{model}}}} p{part:.0%}"[:-1])
            for part in (0.5, 0.99)
        ),
    ),
    Chart(
        "Wait in the queue",
        "From admission to the start of the execution, 99th percentile.",
        "s",
        ((quantile(0.99, "millstream_queue_wait_seconds", "model, pool"), "{{model}} {{pool}}"),),
    ),
    Chart(
        "Execution",
        "Time of a batch on its device, 99th percentile.",
        "s",
        ((quantile(0.99, "millstream_execution_duration_seconds", "model, pool"), "{{model}} {{pool}}"),),
    ),
    Chart(
        "HTTP replies by status",
        "Of all paths, in a second.",
        "reqps",
        ((rate("millstream_http_requests_total", "status"), "{{status}}"),),
    ),
    Chart(
        "gRPC calls by code",
        "Of all methods, in a second.",
        "reqps",
        ((rate("millstream_grpc_calls_total", "code"), "{{code}}"),),
    ),
)

BATCHES = (
    Chart(
        "Rows in a batch",
        "Mean. More under load is what batching is for.",
        "short",
        ((f"{BATCH_ROWS} / {BATCHES_RUN}", "{{model}} {{pool}}"),),
    ),
    Chart(
        "Batches by outcome",
        "Finished by workers in a second.",
        "ops",
        ((rate("millstream_batches_total", "pool, outcome", _OF_MODEL), "{{pool}} {{outcome}}"),),
    ),
    Chart(
        "Waiting",
        "Rows in the gateways' lanes, and batches in the streams (waiting or leased).",
        "short",
        (
            (f"sum by (model, pool) (millstream_lane_rows{{{_OF_MODEL}}})", "{{model}} {{pool}} rows"),
            (f"sum by (model, pool) ({STREAM_ENTRIES})", "{{model}} {{pool}} batches"),
        ),
    ),
)

WORKERS = (
    Chart(
        "Workers busy",
        "Part of the time that a worker runs batches. Near 1: add workers.",
        "percentunit",
        ((rate("millstream_worker_busy_seconds_total", "pool, worker"), "{{pool}} {{worker}}"),),
    ),
    Chart(
        "Memory of instances",
        "By worker; what a worker uses or has promised to loads, and what it may use.",
        "bytes",
        (
            (f"sum by (pool, worker) ({INSTANCE_BYTES})", "{{pool}} {{worker}}"),
            ("max by (pool, worker) (millstream_worker_memory_used_bytes)", "used by {{pool}} {{worker}}"),
            ("max by (pool, worker) (millstream_worker_memory_budget_bytes) > 0", "budget of {{pool}} {{worker}}"),
        ),
    ),
    Chart(
        "Memory of accelerators",
        "By worker; what a worker uses of its accelerator's memory or has promised to loads, and what it may use.",
        "bytes",
        (
            ("max by (pool, worker) (millstream_worker_device_memory_used_bytes)", "used by {{pool}} {{worker}}"),
            ("max by (pool, worker) (millstream_worker_device_memory_budget_bytes)", "budget of {{pool}} {{worker}}"),
        ),
    ),
    Chart(
        "Evictions",
        "Models unloaded for others, in a minute.",
        "short",
        ((f"60 * {EVICTIONS}", "{{model}} {{pool}}"),),
    ),
    Chart(
        "Age at eviction",
        "Median time since the last call of a model when it was unloaded for others: if it is short, memory is too "
        "small.",
        "s",
        ((f"histogram_quantile(0.5, {EVICTION_AGE})", "{{model}} {{pool}}"),),
    ),
    Chart(
        "Time to unload a model",
        "Mean, until its memory is free.",
        "s",
        ((f"{UNLOAD_SECONDS} / {UNLOADS}", "{{model}} {{pool}}"),),
    ),
    Chart(
        "Model cache hit rate",
        "Requests that found their model loaded, of all.",
        "percentunit",
        ((f"{CACHE_HITS} / ({CACHE_HITS} + ({CACHE_MISSES} or 0 * {CACHE_HITS}))", "{{model}}"),),
    ),
    Chart(
        "Model cache misses",
        "Requests that waited for a load, or failed while their model was not loaded, in a second.",
        "reqps",
        ((CACHE_MISSES, "{{model}}"),),
    ),
    Chart(
        "Versions in memory",
        "That each worker has ready.",
        "short",
        (("max by (pool, worker) (millstream_worker_instances)", "{{pool}} {{worker}}"),),
    ),
    Chart(
        "Instances ready by model",
        "Loaded, warm and able to serve.",
        "short",
        ((f"sum by (model, pool) ({INSTANCES_READY})", "{{model}} {{pool}}"),),
    ),
    Chart(
        "Time to load a model",
        "Mean, warm-up included.",
        "s",
        ((f"{LOAD_SECONDS} / {LOADS}", "{{model}} {{pool}}"),),
    ),
    Chart(
        "Cold requests",
        "Requests that found no ready instance, of all. Much of it: the memory is too small for the models in use.",
        "percentunit",
        ((f"sum({COLD_REQUESTS}) / {ALL_REQUESTS}", "all models"),),
    ),
    Chart(
        "Wait for a load",
        "Mean wait of a request for the load of its model.",
        "s",
        ((f"{LOAD_WAIT_SECONDS} / {LOAD_WAITS}", "{{model}} {{pool}}"),),
    ),
)

PROCESSES = (
    Chart(
        "Processor time",
        "Cores that a process keeps busy.",
        "short",
        ((rate("millstream_process_cpu_seconds_total", BY_PROCESS), OF_PROCESS),),
    ),
    Chart("Resident memory", "By process.", "bytes", ((PROCESS.format("resident_memory_bytes"), OF_PROCESS),)),
    Chart(
        "Open files",
        "Part of the descriptors that a process may open.",
        "percentunit",
        ((f"{PROCESS.format('open_fds')} / {PROCESS.format('max_fds')}", OF_PROCESS),),
    ),
    Chart("Threads", "By process.", "short", ((PROCESS.format("threads"), OF_PROCESS),)),
    Chart(
        "Collections of cycles",
        "By Python's garbage collector, in a second.",
        "ops",
        (
            (
                rate("millstream_process_gc_collections_total", f"{BY_PROCESS}, generation"),
                f"{OF_PROCESS} {{{{generation}}}}",
            ),
        ),
    ),
    Chart(
        "Time since start",
        "A process that starts again and again has a defect.",
        "s",
        ((f"time() - max by ({BY_PROCESS}) (millstream_process_start_time_seconds)", OF_PROCESS),),
    ),
)

PLUMBING = (
    Chart(
        "Redis answers",
        "1 while Redis answers a process.",
        "short",
        ((f"min by ({BY_PROCESS}) (millstream_redis_up)", OF_PROCESS),),
    ),
    Chart(
        "Bytes moved",
        "Through Redis and, on one host, through shared memory.",
        "Bps",
        (
            (rate("millstream_redis_bytes_total", "direction"), "Redis {{direction}}"),
            (rate("millstream_segment_bytes_total", "direction"), "shared memory {{direction}}"),
        ),
    ),
    Chart(
        "Memory held for clients",
        "Tensors in shared memory that wait or run, requests that are being received, replies that are not read yet.",
        "bytes",
        (
            ("sum(millstream_segment_in_use_bytes)", "shared memory"),
            ("sum(millstream_requests_receiving_bytes)", "being received"),
            ("sum(millstream_replies_unread_bytes)", "not read yet"),
        ),
    ),
    Chart(
        "Mishaps survived",
        "In a minute: batches taken back from workers that died or fell silent, replies that came twice, connections "
        "to Redis that were restored, metric series refused, runs halved for lack of memory, outputs too large "
        "to be sent, runs terminated at their time limit, loads that failed. And how many requests are refused "
        "because they killed workers.",
        "short",
        (
            *(
                (f"60 * {rate(metric)}", name)
                for metric, name in (
                    ("millstream_batches_reclaimed_total", "batches taken back"),
                    ("millstream_duplicate_replies_total", "duplicate replies"),
                    ("millstream_redis_reconnects_total", "reconnects"),
                    ("millstream_metrics_series_refused_total", "series refused"),
                    ("millstream_runs_out_of_memory_total", "runs without memory"),
                    ("millstream_replies_refused_total", "outputs refused"),
                    ("millstream_runs_terminated_total", "runs ended"),
                    ("millstream_worker_deaths_total", "workers ended by versions"),
                    ("millstream_batches_unreadable_total", "batches of other releases"),
                    ("millstream_batch_checks_total", "batches checked"),
                    ("millstream_model_load_failures_total", "failed loads"),
                )
            ),
            ("sum(millstream_requests_quarantined)", "quarantined requests"),
            ("sum(millstream_version_refused)", "refused versions"),
            ("max(millstream_worker_records_unreadable)", "workers of other releases"),
            ("sum(max by (model, version) (millstream_batching_off))", "versions with batching off"),
        ),
    ),
)

PLACEMENT = (
    Chart(
        "Instances",
        "As the leading controller counts them; missing: fewer than a model's `instances_min`.",
        "short",
        (("sum by (state) (millstream_controller_instances)", "{{state}}"),),
    ),
    Chart(
        "Orders of the controller",
        "In a minute: versions to load or unload, and why.",
        "short",
        ((f"60 * {rate('millstream_controller_orders_total', 'order, reason')}", "{{order}}: {{reason}}"),),
    ),
    Chart(
        "What became of orders",
        "In a minute, and how many are not carried out yet.",
        "short",
        (
            (f"60 * {rate('millstream_controller_order_outcomes_total', 'order, outcome')}", "{{order}}: {{outcome}}"),
            ("sum(millstream_controller_orders_in_flight)", "in flight"),
        ),
    ),
    Chart(
        "Controller",
        "How many lead: 1, or 0 while none does; and the mean time of a round.",
        "short",
        (
            ("sum(millstream_controller_leads)", "leading"),
            (
                (
                    f"{rate('millstream_controller_round_duration_seconds_sum')} / "
                    f"{rate('millstream_controller_round_duration_seconds_count')}"
                ),
                "seconds of a round",
            ),
        ),
    ),
)

RELEASES = Chart(
    "Releases",
    "What is running.",
    "short",
    (("count by (version, python) (millstream_build_info)", "{{version}} on Python {{python}}"),),
)
SPREAD = Chart(
    "Time to answer, all of it",
    "How many requests took how long.",
    "s",
    ((rate("millstream_request_duration_seconds_bucket", "le", _OF_MODEL), "{{le}}"),),
)

Panel = stat.Panel | timeseries.Panel | heatmap.Panel


def _targets(chart: Chart) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().datasource(SOURCE).ref_id(chr(ord("A") + index)).expr(expr).legend_format(legend)
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


def _spread(chart: Chart, number: int) -> Builder[models.Panel]:
    targets = [target.format(PromQueryFormat.HEATMAP) for target in _targets(chart)]
    panel = heatmap.Panel().span(16).height(8).calculate(False).targets([*targets])
    panel.y_axis(heatmap.YAxisConfig().unit(chart.unit))
    return _described(panel, chart, number)


def build() -> str:
    """The dashboard as JSON text."""
    model = (
        QueryVariable("model")
        .label("Model")
        .datasource(SOURCE)
        .query("label_values(millstream_requests_total, model)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )
    board = (
        Dashboard("Millstream")
        .uid("millstream")
        .description("Requests, batches, workers and what carries them.")
        .tags(["millstream"])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(model)
    )
    number = 1
    for chart in STATS:
        board.with_panel(_number(chart, number))
        number += 1
    rows: Sequence[tuple[str, tuple[Chart, ...]]] = (
        ("Requests", REQUESTS),
        ("Batches", BATCHES),
        ("Workers", WORKERS),
        ("Placement", PLACEMENT),
        ("Processes", PROCESSES),
        ("Plumbing", PLUMBING),
    )
    for title, charts in rows:
        board.with_row(Row(title).id(number))
        number += 1
        for chart in charts:
            board.with_panel(_lines(chart, number))
            number += 1
    board.with_row(Row("In detail").id(number))
    board.with_panel(_spread(SPREAD, number + 1))
    board.with_panel(_lines(RELEASES, number + 2))
    # Through the parser once: the builders' order of keys is theirs to change, ours is sorted.
    return json.dumps(json.loads(JSONEncoder().encode(board.build())), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else COMMITTED).write_text(build())
