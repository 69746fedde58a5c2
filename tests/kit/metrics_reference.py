"""Writes docs/metrics.md from the catalogue: `python -m tests.kit.metrics_reference`."""

from __future__ import annotations

from pathlib import Path

from millstream.gateway.app import adapters
from millstream.services.errors import Code
from millstream.services.metrics.catalogue import CATALOGUE, Kind, Metric, RequestProtocol
from millstream.services.metrics.page_totals import MODELS_MAX
from millstream.services.metrics.registry import SERIES_MAX
from millstream.services.wire.orders import OrderReason

PAGE = Path(__file__).parents[2] / "docs/metrics.md"

INTRO = """\
# Metrics

This page is written from `services/metrics/catalogue.py` by `python -m tests.kit.metrics_reference`.

`GET /metrics` of any gateway answers with the metrics of all gateways and workers of its machine, in Prometheus' text
format, or in OpenMetrics for clients that accept it. Counts include processes that ended, so a restart resets none. A
worker that runs alone, in a container or on a machine of its own, has a page of its own
(`MILLSTREAM_METRICS_PORT`), with the names that Prometheus' clients give a single process (`process_…`), too.
`deploy/prometheus` has a configuration with alerts, `deploy/grafana` has dashboards.

Names follow [Prometheus' guide](https://prometheus.io/docs/practices/naming/): base units (seconds, bytes), `_total` on
counters only, `_info` on gauges that are 1 and carry their facts in labels.

The page also has Triton's names (`nv_inference_…`, `nv_cpu_…`, `nv_gpu_…`), unchanged, for dashboards and autoscalers
that were made for Triton. They count the same requests.
"""


def protocols() -> list[str]:
    """Return the protocols of the core, and those of the plug-ins that are on."""
    return list(dict.fromkeys([*RequestProtocol, *(name for adapter in adapters() for name in adapter.protocols)]))


#: label -> the values that it can have
LABELS = {
    "model": "Name of a model.",
    "revision": "The commit that an image was built from; `unknown` outside of images.",
    "version": "Number of a version; of `millstream_build_info`, the release of Millstream.",
    "pool": "Name of a pool.",
    "protocol": f"Protocol of a request: {', '.join(f'`{protocol}`' for protocol in protocols())}; "
    "`graph`: it is a step of a graph.",
    "step": "Name of a step of a graph.",
    "outcome": (
        f"Of requests: `ok`, or the error: {', '.join(f'`{code.value}`' for code in Code)}. "
        "Of steps also `skipped`. Of batches: `ok`, `failed`. Of batch checks: `agrees`, `differs`, `undecided`. "
        "Of orders: `done`, `refused`, `failed`, `lost`. "
        "Of calls with API keys: `allowed`, `forbidden`, `limited`; without a right one: "
        "`missing`, `malformed`, `unknown`, `revoked`, `expired`, `signature`."
    ),
    "reason": (
        "Of refused requests: `gateway_full`, `receiving_full`, `unread_full`, `lane_full`, `deadline`, `quarantined`. "
        "Of refused replies: `too_large`, `redis`. "
        f"Of orders: {', '.join(f'`{reason}`' for reason in OrderReason)}."
    ),
    "key": "Name of an API key; `admin` for the admin key, `none` for calls without a right key.",
    "layer": "Layer of the sandbox: `landlock`, or `namespaces` in its place; `seccomp`.",
    "listener": "Listener with TLS: `http`, `grpc`.",
    "direction": "`gateway_out`, `gateway_in`, `worker_out`.",
    "way": (
        "Of a reply to its gateway: `direct` (its batch came directly, too), `socket`, `tcp` (to a reply port), "
        "`redis`."
    ),
    "worker": (
        "Name of a worker: its pool and number, `cpu-0`, and where hosts share a Redis its host, `cpu-0@web-1`. A "
        "worker that is started again keeps its name."
    ),
    "device": "Device of a worker: `cpu`, `cuda:0`, …",
    "process": (
        "Name of a process: `gateway-0`, `worker-cpu-0`, … A process that is started again keeps its name. Processes "
        "of several machines differ in Prometheus' own label `instance`."
    ),
    "route": "Template of a path, for example `/v2/models/{model}/infer`; `other` for paths that no route has.",
    "method": "HTTP method, or name of a gRPC method; `other` for those that no route or service has.",
    "status": "HTTP status.",
    "code": "gRPC status code: `OK`, `NOT_FOUND`, …",
    "order": "`load`, `unload`.",
    "state": "Of instances: `ready`; `wanted`, by the `instances_min` of models; `missing` of those.",
    "generation": "Generation of Python's garbage collector: `0`, `1`, `2`.",
    "python": "Version of Python.",
}

#: (question, query)
QUERIES = (
    ("Requests per second of each model", "sum by (model) (rate(millstream_requests_total[5m]))"),
    (
        "Share of requests that fail",
        (
            "sum by (model) (rate(millstream_requests_total"
            '{outcome=~"overloaded|unavailable|expired|memory|model|storage|internal"}[5m])) '
            "/ sum by (model) (rate(millstream_requests_total[5m]))"
        ),
    ),
    (
        "99th percentile of the time to answer",
        "histogram_quantile(0.99, sum by (model, le) (rate(millstream_request_duration_seconds_bucket[5m])))",
    ),
    (
        "99th percentile of the wait in the queue: grows if workers are missing",
        "histogram_quantile(0.99, sum by (model, le) (rate(millstream_queue_wait_seconds_bucket[5m])))",
    ),
    (
        "Mean rows of a run: what batching gains",
        "sum by (model) (rate(millstream_batch_rows_sum[5m])) / sum by (model) (rate(millstream_batch_rows_count[5m]))",
    ),
    ("Refused requests per second, by reason", "sum by (reason) (rate(millstream_requests_refused_total[5m]))"),
    (
        "Share of the time that a worker runs batches: near 1, add workers",
        "sum by (pool, worker) (rate(millstream_worker_busy_seconds_total[5m]))",
    ),
    (
        "Rows that wait although no instance is ready",
        (
            "sum by (model, version, pool) (millstream_lane_rows) > 0 "
            "unless max by (model, version, pool) (millstream_instances_ready) > 0"
        ),
    ),
    (
        "Replies 5xx per second, by path",
        'sum by (route, status) (rate(millstream_http_requests_total{status=~"5.."}[5m]))',
    ),
    ("Processes that Redis does not answer", "millstream_redis_up == 0"),
)

#: SageMaker's metric of multi-model endpoints -> ours, and what differs
SAGEMAKER = (
    ("ModelLoadingWaitTime", "millstream_load_wait_seconds", "wait of a request until its model was loaded"),
    ("ModelLoadingTime", "millstream_model_load_duration_seconds", "warm-up included"),
    ("ModelDownloadingTime", "", "none: workers read the repository itself; SageMaker's downloads are part of uploads"),
    ("ModelUnloadingTime", "millstream_model_unload_duration_seconds", "until the memory is free"),
    (
        "ModelCacheHit",
        "millstream_model_cache_hits_total, millstream_model_cache_misses_total",
        "SageMaker's average is hits / (hits + misses)",
    ),
    ("LoadedModelCount", "millstream_worker_instances", "for each worker; by model: `millstream_instances_ready`"),
    (
        "MemoryUtilization",
        "millstream_worker_memory_used_bytes, millstream_worker_memory_budget_bytes",
        "bytes instead of a share; by model: `millstream_instance_memory_bytes`",
    ),
    (
        "none",
        "millstream_evictions_total, millstream_eviction_age_seconds",
        "models unloaded (reason `room`: for others), and the time since their last calls: short if memory is small",
    ),
)

_TYPES = {Kind.COUNTER: "counter", Kind.HISTOGRAM: "histogram"}


def page() -> str:
    """Return the page."""
    return "\n".join(
        (
            INTRO,
            "## Ten queries to begin with\n",
            "| question | query |",
            "|---|---|",
            *(f"| {question} | `{query.replace('|', chr(92) + '|')}` |" for question, query in QUERIES),
            "\n## Labels\n",
            "The values of each label are bounded, by what an administrator created or by a fixed list: what callers",
            f"send makes no series. A process has at most {SERIES_MAX:,} series; more are counted under the label",
            "value `other`.",
            "",
            f"The busiest {MODELS_MAX} models of the last minutes have series of their own on the page",
            '(`MILLSTREAM_METRICS_MODELS_MAX`). The others share the series with `model="other"` and',
            '`version="other"`: their counters are summed, and their gauges. Once a minute a busier model',
            "takes the place of one that is called less. No counter falls then: the series of a model continues",
            "where it stopped, and what was counted meanwhile stays in `other`, so that sums over all models are",
            "right. Statistics of single models (`/v2/models/NAME/stats`) are exact for all models.",
            "",
            "| label | values |",
            "|---|---|",
            *(f"| `{label}` | {values} |" for label, values in LABELS.items()),
            "\n## SageMaker's metrics of multi-model endpoints\n",
            "Ours are in seconds instead of microseconds, and have the labels `model` and `version`.",
            "",
            "| SageMaker | here | note |",
            "|---|---|---|",
            *(f"| {name} | {_code(ours)} | {note} |" for name, ours, note in SAGEMAKER),
            "\n## All metrics\n",
            "| name | type | labels | meaning |",
            "|---|---|---|---|",
            *(_row(metric) for metric in CATALOGUE),
            "",
        )
    )


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ") if name)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {_TYPES.get(metric.kind, 'gauge')} | {labels} | {metric.help} |"


if __name__ == "__main__":
    PAGE.write_text(page())
