"""The page Model: where the time of a model's requests goes, how they batch, and whether the model is in memory."""

from __future__ import annotations

from deploy.grafana.chart import Chart, Page, Shape, Variable
from deploy.grafana.queries import FAILED, OF_MODEL, instances_ready, mean, quantile, rate

_STREAM_ENTRIES = f"max by (model, version, pool) (millstream_stream_entries{{{OF_MODEL}}})"
_HITS = rate("millstream_model_cache_hits_total", "model", OF_MODEL)
_MISSES = rate("millstream_model_cache_misses_total", "model", OF_MODEL)
_COLD = rate("millstream_cold_requests_total", where=OF_MODEL)
_ALL = rate("millstream_requests_total", "model", OF_MODEL)
_FAILING = rate("millstream_requests_total", "model", f"{OF_MODEL}, {FAILED}")
_LINE = "{{model}} {{pool}}"

_ANSWERS = (
    Chart(
        "Requests by version",
        "Answered in a second, whatever the answer.",
        "reqps",
        ((rate("millstream_requests_total", "model, version", OF_MODEL), "{{model}} {{version}}"),),
    ),
    Chart(
        "Failing",
        "Requests that failed for the server's own reasons, of all. The outcomes are on the overview.",
        "percentunit",
        ((f"({_FAILING} or 0 * {_ALL}) / {_ALL}", "{{model}}"),),
    ),
    Chart(
        "Time to answer",
        "From a request's last byte to its reply.",
        "s",
        tuple(
            (quantile(part, "millstream_request_duration_seconds", "model", OF_MODEL), f"{{{{model}}}} {name}")
            for part, name in ((0.5, "p50"), (0.99, "p99"))
        ),
    ),
    Chart(
        "Wait in the queue",
        "From admission to the start of the execution, 99th percentile. If it grows, workers are missing.",
        "s",
        ((quantile(0.99, "millstream_queue_wait_seconds", "model, pool", OF_MODEL), _LINE),),
    ),
    Chart(
        "Execution",
        "Time of a batch on its device, 99th percentile. If it grows, the model or its device is slow.",
        "s",
        ((quantile(0.99, "millstream_execution_duration_seconds", "model, pool", OF_MODEL), _LINE),),
    ),
    Chart(
        "Time to answer, all of it",
        "How many requests took how long.",
        "s",
        ((rate("millstream_request_duration_seconds_bucket", "le", OF_MODEL), "{{le}}"),),
        Shape.HEATMAP,
    ),
)

_BATCHES = (
    Chart(
        "Rows in a batch",
        "Mean. More under load is what batching is for.",
        "short",
        ((mean("millstream_batch_rows", "model, pool", OF_MODEL), _LINE),),
    ),
    Chart(
        "Batches by outcome",
        "Finished by workers in a second.",
        "ops",
        ((rate("millstream_batches_total", "pool, outcome", OF_MODEL), "{{pool}} {{outcome}}"),),
    ),
    Chart(
        "Waiting",
        "Rows in the gateways' lanes, and batches in the streams (waiting or leased).",
        "short",
        (
            (f"sum by (model, pool) (millstream_lane_rows{{{OF_MODEL}}})", f"{_LINE} rows"),
            (f"sum by (model, pool) ({_STREAM_ENTRIES})", f"{_LINE} batches"),
        ),
    ),
)

_MEMORY = (
    Chart(
        "Readiness probes unanswered",
        "In a minute. Idle models are probed: no worker answers those that are counted here.",
        "short",
        ((f"60 * {rate('millstream_readiness_probes_unanswered_total', 'model, pool', OF_MODEL)}", _LINE),),
    ),
    Chart(
        "Instances ready",
        "Loaded, warm and able to serve.",
        "short",
        ((f"sum by (model, pool) ({instances_ready(OF_MODEL)})", _LINE),),
    ),
    Chart(
        "Memory of instances",
        "What the instances of a model take.",
        "bytes",
        (
            (
                (
                    f"sum by (model, pool) (max by (model, version, pool, worker) "
                    f"(millstream_instance_memory_bytes{{{OF_MODEL}}}))"
                ),
                _LINE,
            ),
        ),
    ),
    Chart(
        "Model cache hit rate",
        "Requests that found their model loaded, of all.",
        "percentunit",
        ((f"{_HITS} / ({_HITS} + ({_MISSES} or 0 * {_HITS}))", "{{model}}"),),
    ),
    Chart(
        "Model cache misses",
        "Requests that waited for a load, or failed while their model was not loaded, in a second.",
        "reqps",
        ((_MISSES, "{{model}}"),),
    ),
    Chart(
        "Cold requests",
        "Requests that found no ready instance, of all. Much of it: the memory is too small for the models in use.",
        "percentunit",
        ((f"{_COLD} / {rate('millstream_requests_total', where=OF_MODEL)}", "all chosen models"),),
    ),
    Chart(
        "Wait for a load",
        "Mean wait of a request for the load of its model.",
        "s",
        ((mean("millstream_load_wait_seconds", "model, pool", OF_MODEL), _LINE),),
    ),
    Chart(
        "Time to load",
        "Mean, warm-up included.",
        "s",
        ((mean("millstream_model_load_duration_seconds", "model, pool", OF_MODEL), _LINE),),
    ),
    Chart(
        "Time to unload",
        "Mean, until the memory is free.",
        "s",
        ((mean("millstream_model_unload_duration_seconds", "model, pool", OF_MODEL), _LINE),),
    ),
)

MODEL = Page(
    name="model",
    title="Millstream: Model",
    about="Where the time of a model's requests goes, how they batch, and whether the model is in memory.",
    variables=(Variable("model", "millstream_requests_total"),),
    rows=(("Answers", _ANSWERS), ("Batches", _BATCHES), ("In memory", _MEMORY)),
)
