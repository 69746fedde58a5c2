"""The page Overview: is the service well, who calls it, and what carries it."""

from __future__ import annotations

from deploy.grafana.chart import Chart, Page, Shape, Variable
from deploy.grafana.queries import BY_PROCESS, FAILED, OF_MODEL, OF_PROCESS, instances_ready, of_process, quantile, rate

_ALL = rate("millstream_requests_total", where=OF_MODEL)
_FAILING = rate("millstream_requests_total", where=f"{OF_MODEL}, {FAILED}")

_NUMBERS = (
    Chart("Requests", "Answered in a second.", "reqps", ((_ALL, ""),), Shape.NUMBER),
    Chart(
        "Failing",
        "Requests that failed for the server's own reasons, of all.",
        "percentunit",
        ((f"({_FAILING} or vector(0)) / {_ALL}", ""),),
        Shape.NUMBER,
    ),
    Chart(
        "99th percentile",
        "Time from a request's last byte to its reply.",
        "s",
        ((quantile(0.99, "millstream_request_duration_seconds", where=OF_MODEL), ""),),
        Shape.NUMBER,
    ),
    Chart(
        "In flight",
        "Requests that are admitted and not yet answered.",
        "short",
        (("sum(millstream_requests_in_flight)", ""),),
        Shape.NUMBER,
    ),
    Chart(
        "Instances ready",
        "Loaded, warm and able to serve.",
        "short",
        ((f"sum({instances_ready(OF_MODEL)})", ""),),
        Shape.NUMBER,
    ),
    Chart(
        "Workers",
        "Running now.",
        "short",
        (("count(max by (worker, pool) (millstream_worker_info))", ""),),
        Shape.NUMBER,
    ),
)

_REQUESTS = (
    Chart(
        "Requests by model",
        "Answered in a second, whatever the answer.",
        "reqps",
        ((rate("millstream_requests_total", "model", OF_MODEL), "{{model}}"),),
    ),
    Chart(
        "Requests by outcome",
        "ok, or the code of the error.",
        "reqps",
        ((rate("millstream_requests_total", "outcome", OF_MODEL), "{{outcome}}"),),
    ),
    Chart(
        "Requests by protocol",
        "Answered in a second.",
        "reqps",
        ((rate("millstream_requests_total", "protocol", OF_MODEL), "{{protocol}}"),),
    ),
    Chart(
        "Calls with API keys",
        "Calls whose key was checked, in a second, by key and outcome.",
        "reqps",
        ((rate("millstream_key_requests_total", "key, outcome"), "{{key}} {{outcome}}"),),
    ),
    Chart(
        "What API keys take",
        "Rows in a second, and seconds of runs in a second, by key.",
        "short",
        (
            (rate("millstream_key_rows_total", "key"), "{{key}} rows"),
            (rate("millstream_key_run_seconds_total", "key"), "{{key}} run time"),
        ),
    ),
    Chart(
        "Connections allowed",
        "That a gateway accepts, over HTTP and gRPC each, as its file descriptors allow.",
        "short",
        ((f"max by ({BY_PROCESS}) (millstream_gateway_connections_max)", OF_PROCESS),),
    ),
    Chart(
        "API keys that expire",
        "Time that is left.",
        "s",
        (("max by (key) (millstream_key_expiry_timestamp_seconds) - time()", "{{key}}"),),
    ),
    Chart(
        "Certificates that expire",
        "Time that is left, by listener: the shortest of all machines.",
        "s",
        (
            (
                "min by (listener) (millstream_tls_certificate_expiry_timestamp_seconds) - time()",
                "{{listener}}",
            ),
        ),
    ),
    Chart(
        "Sandbox",
        "1 for each layer that confines what reads or runs uploads. Without one, less is let in (SECURITY.md).",
        "short",
        (("min by (layer) (millstream_sandbox_active)", "{{layer}}"),),
    ),
    Chart(
        "Refused",
        "Turned away before they were queued, by reason; and taken by another pool, by the pool that could not answer.",
        "reqps",
        (
            (rate("millstream_requests_refused_total", "reason"), "{{reason}}"),
            (rate("millstream_requests_overflowed_total", "pool", OF_MODEL), "overflow from {{pool}}"),
        ),
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

_MISHAPS = (
    ("millstream_batches_reclaimed_total", "batches taken back"),
    ("millstream_duplicate_replies_total", "duplicate replies"),
    ("millstream_reply_logins_refused_total", "reply port logins refused"),
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

_CARRIERS = (
    Chart(
        "Redis answers",
        "1 while Redis answers a process.",
        "short",
        ((f"min by ({BY_PROCESS}) (millstream_redis_up)", OF_PROCESS),),
    ),
    Chart(
        "Memory of Redis",
        "What its data take, and its limit, if it has one. At the limit Redis refuses new work.",
        "bytes",
        (
            ("max(millstream_redis_memory_used_bytes)", "used"),
            ("max(millstream_redis_memory_limit_bytes) > 0", "limit"),
        ),
    ),
    Chart(
        "Disk of the models",
        "Uploads are refused below 256 MiB of free space.",
        "bytes",
        (
            ("max(millstream_repository_free_bytes)", "free"),
            ("max(millstream_repository_disk_bytes)", "size"),
        ),
    ),
    Chart(
        "Gateways ready",
        "1 while a gateway is ready: Redis takes batches, and some worker answered a request or readiness probe.",
        "short",
        ((f"min by ({BY_PROCESS}) (millstream_gateway_ready)", OF_PROCESS),),
    ),
    Chart(
        "Batches and replies by way",
        "Batches that took no queue; replies to them, to the socket of a gateway on the worker's host, to the reply "
        "port of one on another host, through Redis.",
        "ops",
        (
            (rate("millstream_batches_direct_total", "pool"), "batches direct {{pool}}"),
            (rate("millstream_batch_replies_total", "way"), "replies {{way}}"),
        ),
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
        "to reply ports that did not log in, connections to Redis that were restored, metric series refused, runs "
        "halved for lack of memory, outputs too large to be sent, runs terminated at their time limit, loads "
        "that failed.",
        "short",
        tuple((f"60 * {rate(metric)}", name) for metric, name in _MISHAPS),
    ),
    Chart(
        "What is out of service",
        "Requests refused because they killed workers, versions refused because they end workers, workers of other "
        "releases, and versions whose requests run one at a time.",
        "short",
        (
            ("sum(millstream_requests_quarantined)", "quarantined requests"),
            ("sum(millstream_version_refused)", "refused versions"),
            ("max(millstream_worker_records_unreadable)", "workers of other releases"),
            ("sum(max by (model, version) (millstream_batching_off))", "versions with batching off"),
        ),
    ),
    Chart(
        "Traces and access log",
        "In a second: spans that the collector took, sampled requests whose trace was dropped, lines of the access log "
        "that were not written. Nothing while both are off.",
        "cps",
        (
            (rate("millstream_trace_spans_exported_total"), "spans exported"),
            (rate("millstream_traced_requests_dropped_total", "reason"), "traces dropped: {{reason}}"),
            (rate("millstream_access_log_lines_dropped_total", "reason"), "lines dropped: {{reason}}"),
        ),
    ),
    Chart(
        "Releases",
        "What is running.",
        "short",
        (
            (
                "count by (version, revision, python) (millstream_build_info)",
                "{{version}} ({{revision}}) on Python {{python}}",
            ),
        ),
    ),
)

_PROCESSES = (
    Chart(
        "Processor time",
        "Cores that a process keeps busy.",
        "short",
        ((rate("millstream_process_cpu_seconds_total", BY_PROCESS), OF_PROCESS),),
    ),
    Chart("Resident memory", "By process.", "bytes", ((of_process("resident_memory_bytes"), OF_PROCESS),)),
    Chart(
        "Open files",
        "Part of the descriptors that a process may open.",
        "percentunit",
        ((f"{of_process('open_fds')} / {of_process('max_fds')}", OF_PROCESS),),
    ),
    Chart("Threads", "By process.", "short", ((of_process("threads"), OF_PROCESS),)),
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

OVERVIEW = Page(
    name="overview",
    title="Millstream: Overview",
    about="Is the service well, who calls it, and what carries it.",
    variables=(Variable("model", "millstream_requests_total"),),
    rows=(
        ("In short", _NUMBERS),
        ("Requests", _REQUESTS),
        ("Redis and shared memory", _CARRIERS),
        ("Processes", _PROCESSES),
    ),
)
