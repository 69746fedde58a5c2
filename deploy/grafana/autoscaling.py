"""The page Autoscaling: the load of each pool, and what its workers can do."""

from __future__ import annotations

from deploy.grafana.chart import Chart, Page, Variable
from deploy.grafana.queries import OF_POOL, quantile, rate

_DECISION = (
    Chart(
        "Workers wanted and ready",
        "By the leading controller; `millstream autoscale explain` prints the arithmetic.",
        "short",
        (
            (f"max by (pool) (millstream_workers_wanted{{{OF_POOL}}})", "{{pool}}: wanted"),
            (f"max by (pool) (millstream_workers_ready{{{OF_POOL}}})", "{{pool}}: ready"),
        ),
    ),
    Chart(
        "Rows that arrive, and that can be answered",
        "In a second; the capacity is that of the ready workers at full batches.",
        "short",
        (
            (f"max by (pool) (millstream_pool_arrival_rows_per_second{{{OF_POOL}}})", "{{pool}}: arrive"),
            (f"max by (pool) (millstream_pool_capacity_rows_per_second{{{OF_POOL}}})", "{{pool}}: capacity"),
        ),
    ),
    Chart(
        "Work that arrives",
        "As a share of what the ready workers can do. Above 100 % the queue grows.",
        "percentunit",
        ((f"max by (pool) (millstream_pool_utilisation_ratio{{{OF_POOL}}})", "{{pool}}"),),
    ),
    Chart(
        "Rows in the pool",
        "Rows that wait or run, of all gateways.",
        "short",
        ((f"max by (pool) (millstream_pool_queue_rows{{{OF_POOL}}})", "{{pool}}"),),
    ),
    Chart(
        "Oldest row",
        "For how long it has waited in a gateway.",
        "s",
        ((f"max by (pool) (millstream_pool_oldest_wait_seconds{{{OF_POOL}}})", "{{pool}}"),),
    ),
)

_DEMAND = (
    Chart(
        "Rows run",
        "By the workers of a pool, in a second.",
        "short",
        ((rate("millstream_batch_rows_sum", "pool", OF_POOL), "{{pool}}"),),
    ),
    Chart(
        "Rows that wait",
        "In the lanes of all gateways.",
        "short",
        ((f"sum by (pool) (millstream_lane_rows{{{OF_POOL}}})", "{{pool}}"),),
    ),
    Chart(
        "Wait in the queue",
        "99th percentile of the time from admission to the start of the run.",
        "s",
        ((quantile(0.99, "millstream_queue_wait_seconds", "pool", OF_POOL), "{{pool}}"),),
    ),
)

_SUPPLY = (
    Chart(
        "Utilisation",
        "Mean part of the time that the workers of a pool run batches.",
        "percentunit",
        (
            (
                (
                    f"avg by (pool) (sum by (pool, worker) "
                    f"(rate(millstream_worker_busy_seconds_total{{{OF_POOL}}}[$__rate_interval])))"
                ),
                "{{pool}}",
            ),
        ),
    ),
    Chart(
        "Workers running",
        "Of a pool.",
        "short",
        ((f"count by (pool) (max by (worker, pool) (millstream_worker_info{{{OF_POOL}}}))", "{{pool}}"),),
    ),
    Chart(
        "Refused for lack of workers",
        "Requests that were turned away because a lane or gateway was full or their deadline could not be met.",
        "reqps",
        (
            (
                rate("millstream_requests_refused_total", "reason", 'reason=~"lane_full|gateway_full|deadline"'),
                "{{reason}}",
            ),
        ),
    ),
)

AUTOSCALING = Page(
    name="autoscaling",
    title="Millstream: Autoscaling",
    about="The load of each pool, and what its workers can do.",
    variables=(Variable("pool", "millstream_worker_info"),),
    rows=(("Decision", _DECISION), ("Demand", _DEMAND), ("Supply", _SUPPLY)),
)
