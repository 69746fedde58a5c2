"""More models than memory, called while they are replaced, deleted, unloaded and workers die: no call is lost."""

from __future__ import annotations

from pathlib import Path

from tests.kit.churn import Churn
from tests.kit.metrics import Page
from tests.kit.stack import Stack, running_stack

MODELS = 10
MODEL_BYTES = 24 << 20
OPERATIONS = 16
RIGHT_MIN = 100


def test_no_call_is_lost_whatever_happens_to_the_models(tmp_path: Path) -> None:
    # Two workers with memory for the interpreter and about five of ten models each.
    with running_stack(tmp_path, gateways=2, pools="cpu=2", settings={"worker_memory": "420MiB"}) as stack:

        def workers() -> list[int]:
            return [pid for name, pid in stack.pids().items() if name.startswith("cpu-")]

        churn = Churn(stack.url, tmp_path, MODELS, MODEL_BYTES, workers, seed=13)
        churn.upload()
        churn.start(callers=6)
        try:
            churn.operate(OPERATIONS)
        finally:
            churn.stop()
        assert not churn.lost, (churn.lost, churn.counts, churn.operations)
        assert churn.counts["right"] > RIGHT_MIN, (churn.counts, churn.operations)
        placed = stack.http.get("/admin/v1/placement").json()
        held = {one["model"] for worker in placed["workers"] for one in worker["instances"]}
        assert 0 < len(held) < MODELS  # else memory was not short
        _check_metrics(stack)


def _check_metrics(stack: Stack) -> None:
    metrics = Page(stack.http.get("/metrics").text)
    assert metrics.value("millstream_evictions_total") > 0
    assert metrics.value("millstream_model_unload_duration_seconds_count") > 0
    assert metrics.value("millstream_cold_requests_total") > 0
    assert metrics.value("millstream_model_cache_misses_total") > 0
    assert metrics.value("millstream_model_cache_hits_total") > 0
    requests = metrics.value("millstream_requests_total")
    assert sum(metrics.value(f"millstream_model_cache_{what}_total") for what in ("hits", "misses")) >= requests
    for worker in ("cpu-0", "cpu-1"):
        budget = metrics.value("millstream_worker_memory_budget_bytes", worker=worker)
        assert 0 < metrics.value("millstream_worker_memory_used_bytes", worker=worker) <= budget
        assert metrics.value("millstream_worker_instances", worker=worker) < MODELS
