"""Counts requests that are lost while models that do not fit into memory together are replaced, and workers die."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.bench import servers
from tests.bench.errors import LoadError
from tests.bench.processes import WORKER, running_module
from tests.kit.churn import Churn

MODELS = 16
MODEL_BYTES = 24 << 20
MEMORY = "420MiB"  # of each worker: the interpreter and about five models
WORKERS = 2
CALLERS = 6
OPERATIONS = 80
SEED = 13

Say = Callable[[str], None]


class Churned(NamedTuple):
    """What became of the calls, and how many operations of each kind were carried out."""

    calls: Counter[str]
    operations: Counter[str]


def measure_churn(folder: Path, say: Say) -> Churned:
    """Call MODELS models during OPERATIONS random operations."""
    say("churn: uploading")
    with servers.millstream_up(folder, "churn", ["--memory", MEMORY], workers=WORKERS) as server:

        def workers() -> list[int]:
            try:
                return running_module(server.pid, WORKER)
            except LoadError:  # all of them were killed, and are being started
                return []

        churn = Churn(server.url, servers.ADMIN, folder, MODELS, MODEL_BYTES, workers, SEED)
        churn.upload()
        say(f"churn: {OPERATIONS} loads, deletes, swaps and deaths")
        churn.start(CALLERS)
        try:
            churn.operate(OPERATIONS)
        finally:
            churn.stop()
    return Churned(churn.counts, churn.operations)
