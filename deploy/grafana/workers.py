"""The page Workers and memory: what workers do, what their memory holds, and what the controller orders."""

from __future__ import annotations

from deploy.grafana.chart import Chart, Page, Variable
from deploy.grafana.queries import OF_POOL, mean, quantile, rate

_WORKER = "{{pool}} {{worker}}"


def _of_worker(metric: str) -> str:
    return f"max by (pool, worker) (millstream_worker_{metric}{{{OF_POOL}}})"


_WORKERS = (
    Chart(
        "Workers",
        "Running now, by device.",
        "short",
        (
            (
                f"count by (pool, device) (max by (worker, pool, device) (millstream_worker_info{{{OF_POOL}}}))",
                "{{pool}} on {{device}}",
            ),
        ),
    ),
    Chart(
        "Workers busy",
        "Part of the time that a worker runs batches. Near 1: add workers.",
        "percentunit",
        ((rate("millstream_worker_busy_seconds_total", "pool, worker", OF_POOL), _WORKER),),
    ),
    Chart(
        "Versions in memory",
        "That each worker has ready.",
        "short",
        ((_of_worker("instances"), _WORKER),),
    ),
)

_MEMORY = (
    Chart(
        "Memory",
        "What the instances of a worker take, what it uses or has promised to loads, and what it may use; what the "
        "models of keys with a memory quota take.",
        "bytes",
        (
            (
                (
                    f"sum by (pool, worker) (max by (model, version, pool, worker) "
                    f"(millstream_instance_memory_bytes{{{OF_POOL}}}))"
                ),
                f"instances of {_WORKER}",
            ),
            (_of_worker("memory_used_bytes"), f"used by {_WORKER}"),
            (f"{_of_worker('memory_budget_bytes')} > 0", f"budget of {_WORKER}"),
            ("max by (key) (millstream_key_memory_bytes)", "models of key {{key}}"),
        ),
    ),
    Chart(
        "Memory of accelerators",
        "What a worker uses of its accelerator's memory or has promised to loads, and what it may use.",
        "bytes",
        (
            (_of_worker("device_memory_used_bytes"), f"used by {_WORKER}"),
            (_of_worker("device_memory_budget_bytes"), f"budget of {_WORKER}"),
        ),
    ),
    Chart(
        "Evictions",
        "Models unloaded in a minute that are still to be served, by reason: for others (room), idle and more.",
        "short",
        (
            (
                f"60 * {rate('millstream_evictions_total', 'model, pool, reason', OF_POOL)}",
                "{{model}} {{pool}}: {{reason}}",
            ),
        ),
    ),
    Chart(
        "Age at eviction",
        "Median time since the last call of a model when it was unloaded, by reason: if it is short for room, memory "
        "is too small.",
        "s",
        (
            (
                quantile(0.5, "millstream_eviction_age_seconds", "model, pool, reason", OF_POOL),
                "{{model}} {{pool}}: {{reason}}",
            ),
        ),
    ),
)

_PLACEMENT = (
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
        "Controllers that lead",
        "1, or 0 while none does.",
        "short",
        (("sum(millstream_controller_leads)", "leading"),),
    ),
    Chart(
        "Round of the controller",
        "Mean time in which it reads the state of the installation, decides, and gives orders.",
        "s",
        ((mean("millstream_controller_round_duration_seconds"), "round"),),
    ),
)

WORKERS = Page(
    name="workers",
    title="Millstream: Workers and memory",
    about="What workers do, what their memory holds, and what the controller orders.",
    variables=(Variable("pool", "millstream_worker_info"),),
    rows=(("Workers", _WORKERS), ("Memory", _MEMORY), ("Placement", _PLACEMENT)),
)
