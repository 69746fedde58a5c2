"""Every metric of the product: its name, help, labels, and how the values of several processes are merged. Pure.

Base units (seconds, bytes), names `millstream_…`. Label values are names that an administrator chose or that are fixed
here, so that the number of series is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a series and how values of several processes are merged; the letter is used in metric files."""

    COUNTER = "c"  # summed, including processes that ended
    HISTOGRAM = "h"  # the same, bucket by bucket
    VECTOR = "v"  # several counters of one subject that change together: summed field by field
    LATEST = "l"  # an instant: the largest, including processes that ended
    GAUGE_SUM = "s"  # each process has a part: summed over live processes
    GAUGE_MAX = "m"  # several processes see the same fact: the largest of live processes

    @property
    def lasting(self) -> bool:
        """Whether the values of a process remain valid after it ended."""
        return self in {Kind.COUNTER, Kind.HISTOGRAM, Kind.VECTOR, Kind.LATEST}

    @property
    def largest(self) -> bool:
        """Whether values of several processes are merged by maximum instead of sum."""
        return self in {Kind.GAUGE_MAX, Kind.LATEST}


class RequestProtocol(StrEnum):
    """The core's values of the label `protocol` of inference requests. The adapters of plug-ins name theirs."""

    V2 = "v2"  # HTTP
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # inclusive upper bounds of a histogram, ascending, without +Inf
    fields: tuple[str, ...] = ()  # of VECTOR, in their order

    @property
    def slots(self) -> int:
        """Number of float64 values of a series: a histogram has its buckets, +Inf and the sum of its observations."""
        if self.kind is Kind.HISTOGRAM:
            return len(self.buckets) + 2
        return len(self.fields) if self.kind is Kind.VECTOR else 1


# Three per decade from 0.1 ms, the minimum of a local round trip, to 60 s, beyond the default deadline.
SECONDS = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Up to 900 s, the default limits of load and warm-up together.
LOAD_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0)
# From a burst to a week: how long ago the last call of an evicted version was.
AGE_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
ROWS = tuple(float(1 << power) for power in range(11))
_LANE = ("model", "version", "pool")

REQUEST_DURATION = Metric(
    "millstream_request_duration_seconds",
    Kind.HISTOGRAM,
    "Time from the last byte of a request to its reply.",
    (*_LANE, "protocol"),
    SECONDS,
)
STEP_DURATION = Metric(
    "millstream_step_duration_seconds",
    Kind.HISTOGRAM,
    "Time from the submission of a step of a graph to its answer.",
    ("model", "version", "step"),
    SECONDS,
)
STEP_REQUESTS = Metric(
    "millstream_step_requests_total",
    Kind.COUNTER,
    "Steps of graphs that ended, or were skipped.",
    ("model", "version", "step", "outcome"),
)
STEP_QUEUE_SECONDS = Metric(
    "millstream_step_queue_seconds_total",
    Kind.COUNTER,
    "Time that answered steps of a graph waited for their runs.",
    ("model", "version", "step"),
)
STEP_RUN_SECONDS = Metric(
    "millstream_step_run_seconds_total",
    Kind.COUNTER,
    "Time of the runs that answered steps of a graph, shared or not.",
    ("model", "version", "step"),
)
QUEUE_WAIT_SECONDS = Metric(
    "millstream_queue_wait_seconds",
    Kind.HISTOGRAM,
    "Time from the admission of a request to the start of its run.",
    _LANE,
    SECONDS,
)
COLD_REQUESTS = Metric(
    "millstream_cold_requests_total",
    Kind.COUNTER,
    "Requests that found no ready instance in the pool, those that were refused included.",
    _LANE,
)
CACHE_HITS = Metric(  # computed for each page: services.metrics.page
    "millstream_model_cache_hits_total",
    Kind.COUNTER,
    "Requests answered that found their model loaded.",
    ("model", "version"),
)
CACHE_MISSES = Metric(
    "millstream_model_cache_misses_total",
    Kind.COUNTER,
    "Requests answered that waited for a load of their model, or failed while it was not loaded.",
    ("model", "version"),
)
LOAD_WAIT_SECONDS = Metric(
    "millstream_load_wait_seconds",
    Kind.HISTOGRAM,
    "Time that a request waited until its model was loaded.",
    _LANE,
    SECONDS,
)
EXECUTION_DURATION = Metric(
    "millstream_execution_duration_seconds", Kind.HISTOGRAM, "Time that a run took on its device.", _LANE, SECONDS
)
BATCH_ROWS = Metric("millstream_batch_rows", Kind.HISTOGRAM, "Rows of a run.", _LANE, ROWS)

REQUESTS = Metric(
    "millstream_requests_total",
    Kind.COUNTER,
    "Requests answered, by outcome.",
    ("model", "version", "protocol", "outcome"),
)
KEY_REQUESTS = Metric(
    "millstream_key_requests_total",
    Kind.COUNTER,
    "Calls whose API key was checked, by outcome.",
    ("key", "outcome"),
)
KEY_ROWS = Metric(
    "millstream_key_rows_total", Kind.COUNTER, "Rows of inference requests that were let in, by API key.", ("key",)
)
KEY_RUN_SECONDS = Metric(
    "millstream_key_run_seconds_total",
    Kind.COUNTER,
    "Seconds of runs by API key, of which a request has its rows' share of its batch's run.",
    ("key",),
)
KEY_MEMORY_BYTES = Metric(
    "millstream_key_memory_bytes",
    Kind.GAUGE_SUM,
    "Memory that the models of a key with a memory quota take in all workers.",
    ("key",),
)
KEY_EXPIRY = Metric(
    "millstream_key_expiry_timestamp_seconds",
    Kind.GAUGE_MAX,
    "When an API key expires, in seconds since the epoch.",
    ("key",),
)
TLS_CERTIFICATE_EXPIRY = Metric(
    "millstream_tls_certificate_expiry_timestamp_seconds",
    Kind.GAUGE_MAX,
    "When the certificate of a TLS listener expires, in seconds since the epoch.",
    ("listener",),
)
SANDBOX = Metric(
    "millstream_sandbox_active",
    Kind.GAUGE_MAX,
    "Whether a layer of the sandbox confines what reads or runs uploads on this machine.",
    ("layer",),
)
REQUESTS_REFUSED = Metric(
    "millstream_requests_refused_total", Kind.COUNTER, "Requests refused before they were queued.", ("reason",)
)
REQUESTS_OVERFLOWED = Metric(
    "millstream_requests_overflowed_total",
    Kind.COUNTER,
    "Requests that a pool could not answer, and that another pool of the version took.",
    _LANE,
)
REQUESTS_IN_FLIGHT = Metric(
    "millstream_requests_in_flight", Kind.GAUGE_SUM, "Requests that are admitted and not yet answered."
)
REQUESTS_RECEIVING_BYTES = Metric(
    "millstream_requests_receiving_bytes",
    Kind.GAUGE_SUM,
    "Bytes of requests that gateways receive and have not admitted.",
)
REQUESTS_QUARANTINED = Metric(
    "millstream_requests_quarantined", Kind.GAUGE_SUM, "Requests that are refused because they killed workers."
)
REPLIES_UNREAD_BYTES = Metric(
    "millstream_replies_unread_bytes",
    Kind.GAUGE_SUM,
    "Bytes of replies in gateways that clients have not read.",
)
REPLIES_REFUSED = Metric(
    "millstream_replies_refused_total",
    Kind.COUNTER,
    "Outputs that became an error, because they were too large or because Redis refused them.",
    ("reason",),
)
BATCH_REPLIES = Metric(
    "millstream_batch_replies_total",
    Kind.COUNTER,
    "Replies of workers to gateways, by way.",
    ("pool", "way"),
)
BATCHES_DIRECT = Metric(
    "millstream_batches_direct_total",
    Kind.COUNTER,
    "Batches that a gateway dispatched to an idle worker without a trip through Redis.",
    ("pool",),
)
DUPLICATE_REPLIES = Metric(
    "millstream_duplicate_replies_total", Kind.COUNTER, "Replies to batches that had been answered already."
)
REPLY_LOGINS_REFUSED = Metric(
    "millstream_reply_logins_refused_total",
    Kind.COUNTER,
    "Connections to reply ports of gateways that were closed because they did not log in.",
)
LANE_ROWS = Metric("millstream_lane_rows", Kind.GAUGE_SUM, "Rows that wait in the lanes of gateways.", _LANE)
STREAM_ENTRIES = Metric(
    "millstream_stream_entries", Kind.GAUGE_MAX, "Batches in the Redis stream, both waiting and leased.", _LANE
)
BATCHES = Metric(
    "millstream_batches_total", Kind.COUNTER, "Batches that a worker finished, by outcome.", (*_LANE, "outcome")
)
BATCHES_RECLAIMED = Metric(
    "millstream_batches_reclaimed_total",
    Kind.COUNTER,
    "Batches that were taken back from workers that died or fell silent.",
    ("pool",),
)
BATCHES_UNREADABLE = Metric(
    "millstream_batches_unreadable_total",
    Kind.COUNTER,
    "Batches that a worker passed on because another release wrote them or they were damaged.",
    ("pool",),
)
BATCH_CHECKS = Metric(
    "millstream_batch_checks_total",
    Kind.COUNTER,
    "Live batches that were compared with runs of single rows or of the version's own file, by outcome.",
    ("model", "version", "outcome"),
)
BATCHING_OFF = Metric(
    "millstream_batching_off",
    Kind.GAUGE_MAX,
    "1 while requests of a version run one at a time because its rows influence each other.",
    ("model", "version"),
)
RUNS_OUT_OF_MEMORY = Metric(
    "millstream_runs_out_of_memory_total",
    Kind.COUNTER,
    "Runs that found no memory and, with several rows, were halved.",
    _LANE,
)
RUNS_TERMINATED = Metric(
    "millstream_runs_terminated_total", Kind.COUNTER, "Runs that were terminated at their time limit.", _LANE
)
INSTANCES_READY = Metric("millstream_instances_ready", Kind.GAUGE_MAX, "Instances that may serve.", _LANE)
INSTANCE_MEMORY_BYTES = Metric(
    "millstream_instance_memory_bytes", Kind.GAUGE_MAX, "Memory that an instance takes.", (*_LANE, "worker")
)
GATEWAY_READY = Metric(
    "millstream_gateway_ready", Kind.GAUGE_MAX, "1 while a gateway is ready, and 0 while it is not.", ("process",)
)
PROBES_UNANSWERED = Metric(
    "millstream_readiness_probes_unanswered_total",
    Kind.COUNTER,
    "Readiness probes of a version that no worker answered.",
    _LANE,
)
VERSION_REFUSED = Metric(
    "millstream_version_refused", Kind.GAUGE_MAX, "1 while a version is refused because it ends workers.", _LANE
)
WORKER_INFO = Metric(
    "millstream_worker_info", Kind.GAUGE_MAX, "A running worker and its device.", ("worker", "pool", "device")
)
WORKER_MEMORY_BUDGET_BYTES = Metric(
    "millstream_worker_memory_budget_bytes",
    Kind.GAUGE_MAX,
    "Memory that a worker may use, or 0 without a limit.",
    ("pool", "worker"),
)
WORKER_MEMORY_USED_BYTES = Metric(
    "millstream_worker_memory_used_bytes",
    Kind.GAUGE_MAX,
    "Memory of a worker that is in use, promised to loads in progress, or not yet free after an unload.",
    ("pool", "worker"),
)
WORKER_DEVICE_MEMORY_BUDGET_BYTES = Metric(
    "millstream_worker_device_memory_budget_bytes",
    Kind.GAUGE_MAX,
    "Memory of its accelerator that a worker may use, or no series without a limit.",
    ("pool", "worker"),
)
WORKER_DEVICE_MEMORY_USED_BYTES = Metric(
    "millstream_worker_device_memory_used_bytes",
    Kind.GAUGE_MAX,
    "Memory of its accelerator that a worker uses or promised to loads, or that is not yet free.",
    ("pool", "worker"),
)
WORKER_BUSY_SECONDS = Metric(
    "millstream_worker_busy_seconds_total", Kind.COUNTER, "Time for which a worker ran batches.", ("pool", "worker")
)
WORKER_DEATHS = Metric(
    "millstream_worker_deaths_total",
    Kind.COUNTER,
    "Deaths of workers while they ran a version, and runs of it that took far too long.",
    _LANE,
)
WORKER_RECORDS_UNREADABLE = Metric(
    "millstream_worker_records_unreadable",
    Kind.GAUGE_MAX,
    "Workers that are left out because another release wrote their records.",
)
REPOSITORY_FREE_BYTES = Metric(
    "millstream_repository_free_bytes", Kind.GAUGE_MAX, "Free space of the disk that holds the models."
)
REPOSITORY_DISK_BYTES = Metric(
    "millstream_repository_disk_bytes", Kind.GAUGE_MAX, "Size of the disk that holds the models."
)
MODEL_LOAD_DURATION = Metric(
    "millstream_model_load_duration_seconds",
    Kind.HISTOGRAM,
    "Time that a worker took to load a version and warm it up.",
    _LANE,
    LOAD_SECONDS,
)
MODEL_UNLOAD_DURATION = Metric(
    "millstream_model_unload_duration_seconds",
    Kind.HISTOGRAM,
    "Time that a worker took to unload a version until its memory was free.",
    _LANE,
    LOAD_SECONDS,
)
EVICTIONS = Metric(
    "millstream_evictions_total",
    Kind.COUNTER,
    "Versions that a worker unloaded although they are still to be served, by reason.",
    (*_LANE, "reason"),
)
RACES_ENDED = Metric(
    "millstream_races_ended_total",
    Kind.COUNTER,
    "Races of compiled forms that ended, by outcome, where interrupted ones go on later.",
    ("outcome",),
)
RACES_WAITING = Metric(
    "millstream_races_waiting",
    Kind.GAUGE_MAX,
    "Races that wait for a worker, or run.",
    ("state",),
)
RACE_DURATION = Metric(
    "millstream_race_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a race until its verdict.",
    (),
    LOAD_SECONDS,
)
VARIANTS_SWAPPED = Metric(
    "millstream_variants_swapped_total",
    Kind.COUNTER,
    "Versions that a worker began to serve with compiled forms which won a race.",
    _LANE,
)
VARIANTS_UNDONE = Metric(
    "millstream_variants_undone_total",
    Kind.COUNTER,
    "Verdicts of races that a worker took back because a compiled form failed, was wrong or was slow.",
    _LANE,
)
EVICTION_AGE = Metric(
    "millstream_eviction_age_seconds",
    Kind.HISTOGRAM,
    "Time since the last call of a version when it was evicted, by reason.",
    (*_LANE, "reason"),
    AGE_SECONDS,
)
WORKER_INSTANCES = Metric(
    "millstream_worker_instances", Kind.GAUGE_MAX, "Versions that a worker has ready.", ("pool", "worker")
)
MODEL_LOAD_FAILURES = Metric(
    "millstream_model_load_failures_total", Kind.COUNTER, "Loads of a version that failed in a worker.", _LANE
)
REDIS_UP = Metric(
    "millstream_redis_up",
    Kind.GAUGE_MAX,
    "1 while Redis answers a process, and 0 while it does not.",
    ("process",),
)
REDIS_RECONNECTS = Metric(
    "millstream_redis_reconnects_total", Kind.COUNTER, "Connections to Redis that were restored.", ("process",)
)
REDIS_MEMORY_USED_BYTES = Metric(
    "millstream_redis_memory_used_bytes", Kind.GAUGE_MAX, "Memory that Redis uses for data, as it reports it."
)
REDIS_MEMORY_LIMIT_BYTES = Metric(
    "millstream_redis_memory_limit_bytes", Kind.GAUGE_MAX, "Memory that Redis may use, or 0 without a limit."
)
REDIS_BYTES = Metric("millstream_redis_bytes_total", Kind.COUNTER, "Bytes sent through Redis.", ("direction",))
SEGMENT_BYTES = Metric(
    "millstream_segment_bytes_total", Kind.COUNTER, "Bytes of tensors sent through shared memory.", ("direction",)
)
SEGMENT_IN_USE_BYTES = Metric(
    "millstream_segment_in_use_bytes", Kind.GAUGE_SUM, "Bytes of shared memory that hold tensors now."
)
HTTP_REQUESTS = Metric(
    "millstream_http_requests_total",
    Kind.COUNTER,
    "Replies over HTTP, by the template of the path, method and status.",
    ("route", "method", "status"),
)
GRPC_CALLS = Metric(
    "millstream_grpc_calls_total", Kind.COUNTER, "Calls over gRPC that ended, by method and code.", ("method", "code")
)
CONTROLLER_LEADS = Metric("millstream_controller_leads", Kind.GAUGE_SUM, "Controllers that lead.")
CONTROLLER_INSTANCES = Metric(
    "millstream_controller_instances",
    Kind.GAUGE_SUM,
    "Instances as the leading controller counts them.",
    ("state",),
)
CONTROLLER_ORDERS = Metric(
    "millstream_controller_orders_total",
    Kind.COUNTER,
    "Orders of controllers to load or unload a version, by reason.",
    ("order", "reason"),
)
CONTROLLER_OUTCOMES = Metric(
    "millstream_controller_order_outcomes_total",
    Kind.COUNTER,
    "Orders of controllers that were carried out (done), refused, failed, or lost.",
    ("order", "outcome"),
)
CONTROLLER_ORDERS_IN_FLIGHT = Metric(
    "millstream_controller_orders_in_flight",
    Kind.GAUGE_SUM,
    "Orders of the leading controller that are not carried out yet.",
)
CONTROLLER_ROUND_DURATION = Metric(
    "millstream_controller_round_duration_seconds",
    Kind.HISTOGRAM,
    "Time in which the leading controller reads the state of the installation, decides, and gives orders.",
    (),
    SECONDS,
)
WORKERS_WANTED = Metric(
    "millstream_workers_wanted",
    Kind.GAUGE_MAX,
    "Workers that a pool should have, by the leading controller, for scalers of any kind.",
    ("pool",),
)
WORKERS_READY = Metric(
    "millstream_workers_ready",
    Kind.GAUGE_MAX,
    "Workers of a pool that serve, by the leading controller, without those whose loads all failed.",
    ("pool",),
)
POOL_QUEUE_ROWS = Metric(
    "millstream_pool_queue_rows", Kind.GAUGE_MAX, "Rows that wait or run in a pool, of all gateways.", ("pool",)
)
POOL_OLDEST_WAIT = Metric(
    "millstream_pool_oldest_wait_seconds",
    Kind.GAUGE_MAX,
    "For how long the oldest row of a pool has waited in a gateway.",
    ("pool",),
)
POOL_ARRIVALS = Metric(
    "millstream_pool_arrival_rows_per_second",
    Kind.GAUGE_MAX,
    "Rows a second that arrive for a pool, refused ones included, over the start time of a worker.",
    ("pool",),
)
POOL_CAPACITY = Metric(
    "millstream_pool_capacity_rows_per_second",
    Kind.GAUGE_MAX,
    "Rows a second that the ready workers of a pool answer at full batches, by measured run times.",
    ("pool",),
)
POOL_UTILISATION = Metric(
    "millstream_pool_utilisation_ratio",
    Kind.GAUGE_MAX,
    "Work that arrives for a pool as a share of what its ready workers can do.",
    ("pool",),
)
POOL_SCALE = (
    WORKERS_WANTED,
    WORKERS_READY,
    POOL_QUEUE_ROWS,
    POOL_OLDEST_WAIT,
    POOL_ARRIVALS,
    POOL_CAPACITY,
    POOL_UTILISATION,
)
PROCESS_CPU_SECONDS = Metric(
    "millstream_process_cpu_seconds_total",
    Kind.COUNTER,
    "Processor time of a process and of its predecessors of the same name.",
    ("process",),
)
PROCESS_RESIDENT_BYTES = Metric(
    "millstream_process_resident_memory_bytes", Kind.GAUGE_SUM, "Resident memory of a process.", ("process",)
)
PROCESS_OPEN_FDS = Metric(
    "millstream_process_open_fds", Kind.GAUGE_SUM, "Open file descriptors of a process.", ("process",)
)
PROCESS_MAX_FDS = Metric(
    "millstream_process_max_fds", Kind.GAUGE_MAX, "File descriptors that a process may open.", ("process",)
)
CONNECTIONS_MAX = Metric(
    "millstream_gateway_connections_max",
    Kind.GAUGE_SUM,
    "Connections that a gateway accepts, over HTTP and gRPC each, as its file descriptors allow.",
    ("process",),
)
PROCESS_THREADS = Metric("millstream_process_threads", Kind.GAUGE_SUM, "Threads of a process.", ("process",))
PROCESS_START_TIME = Metric(
    "millstream_process_start_time_seconds",
    Kind.GAUGE_MAX,
    "When a process started, in seconds since the epoch.",
    ("process",),
)
PROCESS_GC_COLLECTIONS = Metric(
    "millstream_process_gc_collections_total",
    Kind.COUNTER,
    "Collections of reference cycles in a process, by generation.",
    ("process", "generation"),
)
BUILD_INFO = Metric(
    "millstream_build_info",
    Kind.GAUGE_MAX,
    "The running release, its commit and its Python.",
    ("version", "revision", "python"),
)
SERIES_REFUSED = Metric(
    "millstream_metrics_series_refused_total",
    Kind.COUNTER,
    "Series refused beyond the limit of a process, which are counted under the label value other.",
)

#: every metric that is defined above
TRACES_SPANS_EXPORTED = Metric("millstream_trace_spans_exported_total", Kind.COUNTER, "Spans that the collector took.")
TRACED_REQUESTS_DROPPED = Metric(
    "millstream_traced_requests_dropped_total",
    Kind.COUNTER,
    "Sampled requests whose trace was dropped (buffer_full, tail_limit, export_failed).",
    ("reason",),
)
ACCESS_LINES_DROPPED = Metric(
    "millstream_access_log_lines_dropped_total",
    Kind.COUNTER,
    "Lines of the access log that were not written (buffer_full, write_failed).",
    ("reason",),
)
CATALOGUE: tuple[Metric, ...] = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))
